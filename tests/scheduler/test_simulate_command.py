"""`millstream simulate`: what it prints and writes, and how it says what is wrong."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from millstream.common.config import SCHEDULE_POLICIES
from millstream.scheduler.recording.schedule_recorder import RecordedScheduler, ScheduleRecorder
from millstream.scheduler.scheduler_config import SchedulerConfig
from millstream.scheduler.simulation.cost_model import load_cost_model
from millstream.scheduler.simulation.distribution import parse_lengths
from millstream.scheduler.simulation.simulation import Simulation
from millstream.scheduler.simulation.simulate_command import main
from millstream.scheduler.simulation.workload import Workload, make_trace

SMALL = ["--num-requests", "40", "--request-rate", "20", "--output-len", "uniform:1:20", "--input-len", "64"]


def lines_of(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_table_has_a_line_for_each_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--policies", "fcfs,lof"]) == 0
    title, _, header, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith("40 requests, 2,560 prompt and ")
    assert header.startswith("policy")
    assert [row.split()[0] for row in rows] == ["fcfs", "lof"]
    assert {len(row) for row in rows} == {len(header)}


def test_json_lines_carry_the_figures_and_depend_on_the_seed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for seed in ("1", "1", "2"):
        assert main([*SMALL, "--json", "--seed", seed]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]
    (report,) = lines_of(outputs[0])
    assert report["policy"] == "fcfs"
    assert report["num_requests"] == 40
    assert report["num_failed"] == 0
    assert report["goodput_share"] == 1
    assert {"ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "queue_ms", "hit_rate", "num_retractions"} <= report.keys()


@pytest.mark.parametrize("policy", SCHEDULE_POLICIES)
def test_every_policy_of_the_server_can_be_simulated(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--json", "--policies", policy, "--shared-prefix", "64", "--num-prefixes", "3"]) == 0
    (report,) = lines_of(capsys.readouterr().out)
    assert report["num_failed"] == 0
    assert report["policy"] == policy


def test_priorities_are_reported_apart(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--enable-priority-scheduling", "--priority-levels", "2", "--max-running-requests", "2"]
    assert main([*SMALL, "--json", "--request-rate", "1000", *flags]) == 0
    (report,) = lines_of(capsys.readouterr().out)
    by_priority = report["ttft_ms_by_priority"]
    assert isinstance(by_priority, dict)
    assert by_priority["1"]["mean"] < by_priority["0"]["mean"]


def test_the_servers_flags_reach_the_scheduler(capsys: pytest.CaptureFixture[str]) -> None:
    queue = ["--max-running-requests", "1", "--max-queued-requests", "2", "--request-rate", "1000"]
    assert main([*SMALL, *queue]) == 0
    out = capsys.readouterr().out
    assert "fcfs: first failure: 429" in out
    assert main([*SMALL, "--max-total-tokens", "160", "--page-size", "32", "--tp-size", "2"]) == 0
    assert "tp 2, 160 KV tokens" in capsys.readouterr().out


def test_the_plot_is_a_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plot.png"
    assert main([*SMALL, "--policies", "fcfs,lof", "--plot", str(file)]) == 0
    head = file.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    assert min(struct.unpack(">II", head[16:24])) > 500


def test_without_matplotlib_only_a_plot_fails_and_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from millstream.scheduler.simulation.simulate_command import main\n"
        "print(main(sys.argv[1:]), main([*sys.argv[1:], '--plot', 'x.png']))"
    )
    root = Path(__file__).parent.parent.parent
    environment = {"PYTHONPATH": str(root / ".pkg")}
    command = [sys.executable, "-P", "-c", code, *SMALL]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("\n0 2\n")
    assert done.stderr == "millstream simulate: error: --plot needs matplotlib: pip install 'millstream[plot]'\n"


def test_a_trace_file_is_simulated_in_its_own_time_or_in_a_closed_loop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.jsonl"
    line = '{"arrival": %d, "input_length": 100, "output_length": 5, "hash_ids": [4]}'
    file.write_text("\n".join(line % (10 * i) for i in range(6)))
    seconds = []
    for flags in ([], ["--arrival", "closed", "--num-users", "2"], ["--num-requests", "2"]):
        assert main(["--json", "--trace", str(file), "--hash-block-len", "64", *flags]) == 0
        (report,) = lines_of(capsys.readouterr().out)
        seconds.append(report["seconds"])
        assert float(str(report["hit_rate"])) > 0.2
    assert [int(float(str(each))) for each in seconds] == [50, 0, 10]


def test_a_cost_model_is_fitted_to_a_recording_and_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = load_cost_model("smollm2_cpu")
    config = SchedulerConfig(
        num_pages=500, page_size=16, vocab_size=costs.model.vocab_size + 1, context_len=2048, max_running_requests=8
    )
    lengths = {"input_len": parse_lengths("exponential:64"), "output_len": parse_lengths("8")}
    trace = make_trace(Workload(num_requests=20, request_rate=3.0, context_len=2048, **lengths))
    scheduler = RecordedScheduler(config, ScheduleRecorder(tmp_path / "recorded", config))
    Simulation(scheduler, costs, 1, trace).run()
    scheduler.recorder.close()
    out = tmp_path / "fitted.json"
    assert main(["--fit", str(tmp_path / "recorded"), "--out", str(out), "--cost-model", "smollm2_cpu", "--json"]) == 0
    for error in lines_of(capsys.readouterr().out):
        assert float(str(error["median_percent"])) < 2
    assert "Fitted to" in load_cost_model(str(out)).description
    assert main([*SMALL, "--cost-model", str(out)]) == 0
    assert main(["--trace", str(tmp_path / "recorded"), "--cost-model", str(out), "--json"]) == 0
    assert lines_of(capsys.readouterr().out.splitlines()[-1])[0]["num_requests"] == 20


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--num-requests", "0"], "--num-requests must be at least 1"),
        (["--request-rate", "nan"], "--request-rate must be"),
        (["--request-rate", "x"], "--request-rate"),
        (["--arrival", "never"], "--arrival"),
        (["--input-len", "uniform:5"], "--input-len: must be"),
        (["--turns", "0"], "--turns: lengths must be"),
        (["--policies", "fcfs,best"], "--policies takes"),
        (["--policies", "lpm", "--enable-priority-scheduling"], "--enable-priority-scheduling goes with"),
        (["--page-size", "12"], "--page-size must be a power of two"),
        (["--seed", "-1"], "--seed must be"),
        (["--cost-model", "h300"], "h300: No such file or directory (packaged models: h200, smollm2_cpu)"),
        (["--trace", "/no/such"], "/no/such: No such file"),
        (["--trace", "x", "--input-len", "5"], "--input-len goes with a synthetic trace"),
        (["--trace", "x", "--arrival", "poisson"], "--arrival with --trace must be closed"),
        (["--hash-block-len", "5"], "--hash-block-len goes with --trace"),
        (["--num-users", "5"], "--num-users goes with --arrival closed"),
        (["--arrival", "closed", "--request-rate", "5"], "--request-rate does not go with --arrival closed"),
        (["--arrival-cv", "5"], "--arrival-cv goes with --arrival gamma"),
        (["--think-time", "5"], "--think-time goes with"),
        (["--num-prefixes", "5"], "--num-prefixes goes with --shared-prefix"),
        (["--tree-branching", "5"], "--tree-branching goes with --tree-depth"),
        (["--tree-depth", "2", "--shared-prefix", "5"], "exclude each other"),
        (["--fit", "x"], "--fit RECORDED and --out FILE go together"),
        (["--fit", "/no/such", "--out", "y"], "/no/such: No such file"),
        (["--fit", "x", "--out", "y", "--turns", "2"], "--turns does not go with --fit"),
        (["--max-total-tokens", "5"], "--max-total-tokens must hold at least one page"),
        (["--plot", "/no/such/plot.png", *SMALL], "--plot /no/such/plot.png: No such file"),
        (["--polices", "fcfs"], "did you mean --policies?"),
        (["extra"], "unknown argument extra"),
    ],
)
def test_a_wrong_command_line_is_one_line_that_names_the_flag(
    argv: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("millstream simulate: error: ")
    assert captured.err.count("\n") == 1
    assert text in captured.err


def test_weights_that_leave_no_room_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "small.json"
    costs = json.loads((Path(main.__code__.co_filename).parent / "cost_models" / "h200.json").read_text())
    costs["device"]["usable_memory_bytes"] = 1e9
    file.write_text(json.dumps(costs))
    assert main(["--cost-model", str(file)]) == 2
    assert "weights leave no memory" in capsys.readouterr().err
    assert main(["--cost-model", str(file), "--max-total-tokens", "100000", *SMALL]) == 0
