"""`millstream simulate`: what it prints and writes, and how it says what is wrong."""

import json
import struct
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest

from millstream.common.config import SCHEDULE_POLICIES
from millstream.scheduler.recording.schedule_recorder import RecordedScheduler, ScheduleRecorder
from millstream.scheduler.scheduler_config import SchedulerConfig
from millstream.scheduler.simulation.cost_model import load_cost_model
from millstream.scheduler.simulation.distribution import parse_lengths
from millstream.scheduler.simulation.plot import _draw_bars, _draw_curves
from millstream.scheduler.simulation.simulate_command import main
from millstream.scheduler.simulation.simulation import Simulation
from millstream.scheduler.simulation.workload import Workload, make_trace

SMALL = ["--num-requests", "40", "--request-rate", "20", "--output-len", "uniform:1:20", "--input-len", "64"]


def lines_of(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_table_has_a_line_for_each_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--policies", "fcfs,lof"]) == 0
    title, _, header, *rows, note = capsys.readouterr().out.splitlines()
    assert note == "fcfs, lof: the same figures (their orders made no difference on this load)"
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
    assert main([*SMALL, "--request-rate", "1000", *flags, "--policies", "fcfs,lof"]) == 0
    out = capsys.readouterr().out
    header, *rows = out[out.index("TTFT ms p50 by priority") :].splitlines()
    assert header.split()[-2:] == ["0", "1"]
    assert [row.split()[0] for row in rows] == ["fcfs", "lof"]
    for row in rows:
        low, high = (float(cell.replace(",", "")) for cell in row.split()[1:])
        assert high < low


CROWDED = ["--num-requests", "60", "--request-rate", "1000", "--max-running-requests", "3", "--input-len", "64"]


@pytest.mark.parametrize(
    ("policy", "flags"),
    [
        ("lof", []),
        ("random", []),
        ("routing-key", ["--shared-prefix", "256", "--num-prefixes", "4"]),
        ("lpm", ["--shared-prefix", "256", "--num-prefixes", "4"]),
        ("dfs-weight", ["--shared-prefix", "256", "--num-prefixes", "4"]),
    ],
)
def test_a_policy_means_something_where_requests_wait(
    policy: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*CROWDED, *flags, "--policies", f"fcfs,{policy}", "--json"]) == 0
    captured = capsys.readouterr()
    fcfs, other = lines_of(captured.out)
    assert fcfs["queue_ms"] != other["queue_ms"]
    assert captured.err == ""


@pytest.mark.parametrize(
    ("policy", "flags", "reason"),
    [
        ("lof", ["--max-new-tokens", "50"], "lof: every request has the same max_new_tokens"),
        ("routing-key", [], "routing-key: no request has a routing key"),
        ("lpm", [], "lpm: no prompt begins with what is cached"),
    ],
)
def test_a_policy_that_has_nothing_to_go_by_is_named_with_the_reason(
    policy: str, flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*CROWDED, *flags, "--policies", f"fcfs,{policy}"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"fcfs, {policy}: the same figures ({reason})"


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
    assert capsys.readouterr().out.endswith(f"\nwrote {file}\n")
    head = file.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    assert min(struct.unpack(">II", head[16:24])) > 500


@pytest.mark.parametrize("name", ["plot.svg", "plot", "no/such/plot.png", "folder.png"])
def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_simulated(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder.png").mkdir()
    path = tmp_path / name
    assert main([*SMALL, "--plot", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"millstream simulate: error: --plot {path}: ")
    assert captured.err.count("\n") == 1


def test_equal_curves_are_told_apart_and_bars_have_their_colour_and_begin_at_0() -> None:
    to_hex = pytest.importorskip("matplotlib.colors").to_hex
    axes_of = pytest.importorskip("matplotlib.figure").Figure().subplots
    axes = axes_of()
    _draw_curves(axes, ["fcfs", "lof", "lpm"], [np.linspace(4.0, 4.9, 50)] * 3, 50.0)
    lines = axes.lines[:3]
    for look in ("get_linestyle", "get_marker", "get_color", "get_linewidth"):
        assert len({getattr(line, look)() for line in lines}) == 3, look
    axes.figure.canvas.draw()
    boxes = [text.get_window_extent() for text in axes.get_xticklabels(which="both") if text.get_text()]
    boxes = [box for box in boxes if axes.bbox.x0 - 1 <= (box.x0 + box.x1) / 2 <= axes.bbox.x1 + 1]
    assert len(boxes) >= 3
    assert all(left.x1 < right.x0 for left, right in pairwise(sorted(boxes, key=lambda box: box.x0)))
    bars = axes_of()
    _draw_bars(bars, ["fcfs", "lof", "lpm"], [0.0, 0.0, 0.0], "hit rate")
    assert bars.get_ylim() == (0, 1)
    assert [to_hex(bar.get_facecolor()) for bar in bars.patches] == [to_hex(line.get_color()) for line in lines]


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


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A simulated run of smollm2_cpu, recorded."""
    costs = load_cost_model("smollm2_cpu")
    config = SchedulerConfig(
        num_pages=500,
        page_size=32,
        vocab_size=costs.model.vocab_size + 1,
        context_len=2048,
        max_running_requests=8,
        schedule_policy="lof",
    )
    lengths = {"input_len": parse_lengths("exponential:64"), "output_len": parse_lengths("8")}
    trace = make_trace(Workload(num_requests=20, request_rate=3.0, context_len=2048, **lengths))
    scheduler = RecordedScheduler(config, ScheduleRecorder(tmp_path / "recorded", config))
    Simulation(scheduler, costs, 1, trace).run()
    scheduler.recorder.close()
    return tmp_path / "recorded"


def test_a_cost_model_is_fitted_to_a_recording_and_used(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "fitted.json"
    flags = ["--fit", str(recorded), "--out", str(out), "--cost-model", "smollm2_cpu"]
    assert main([*flags, "--json"]) == 0
    captured = capsys.readouterr()
    for error in lines_of(captured.out):
        assert float(str(error["median_percent"])) < 2
    assert captured.err == f"wrote {out}: smollm2_cpu with the times of {recorded}\n"
    fitted = out.read_bytes()
    assert "Fitted to" in load_cost_model(str(out)).description
    assert main(flags) == 2
    assert (
        capsys.readouterr().err == f"millstream simulate: error: --out {out}: the file exists, and is not overwritten\n"
    )
    assert out.read_bytes() == fitted
    out.unlink()
    assert main(flags) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[0].startswith("prefill ")
    assert captured.out.splitlines()[-1].startswith(f"wrote {out}")
    assert captured.err == ""
    assert main([*SMALL, "--cost-model", str(out)]) == 0
    assert main(["--trace", str(recorded), "--cost-model", str(out), "--json"]) == 0
    assert lines_of(capsys.readouterr().out.splitlines()[-1])[0]["num_requests"] == 20


def test_a_fit_over_another_models_sizes_or_of_disturbed_steps_is_warned_of(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--fit", str(recorded), "--out"]
    assert main([*flags, str(tmp_path / "other.json"), "--cost-model", "h200"]) == 0
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("millstream simulate: warning: the recorded model has a vocabulary of 49,153")
    lines = recorded.read_bytes().splitlines()
    for number, line in enumerate(lines):
        if b'"type":"BatchResult"' in line and number % 5 == 0:
            lines[number] = line.replace(b'"step_seconds":0.', b'"step_seconds":7.')
    recorded.write_bytes(b"\n".join(lines) + b"\n")
    assert main([*flags, str(tmp_path / "disturbed.json"), "--cost-model", "smollm2_cpu"]) == 0
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("millstream simulate: warning: the fit is far from a tenth of the recorded steps (p90: ")


def test_a_recording_brings_its_configuration_and_flags_override_it(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--trace", str(recorded), "--cost-model", "smollm2_cpu"]
    assert main(flags) == 0
    first, title, _, _, row = capsys.readouterr().out.splitlines()
    told = "the recorded configuration is used (lof, 16,000 KV tokens in pages of 32, at most 8 running)"
    assert first == told
    assert title.endswith("tp 1, 16,000 KV tokens")
    assert row.split()[0] == "lof"
    assert main([*flags, "--max-total-tokens", "3200", "--policies", "fcfs", "--max-running-requests", "1"]) == 0
    first, title, _, _, row = capsys.readouterr().out.splitlines()
    assert first == f"{told}, but for --max-running-requests, --max-total-tokens, --policies"
    assert title.endswith("tp 1, 3,200 KV tokens")
    assert row.split()[0] == "fcfs"


def test_a_recording_is_simulated_as_with_its_flags_by_hand(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--trace", str(recorded), "--cost-model", "smollm2_cpu", "--json"]
    lines = recorded.read_bytes().splitlines(keepends=True)
    header = msgspec.json.decode(lines[0])
    outputs = []
    for num_rows, by_hand in ((8, []), (8, ["--max-running-requests", "1"]), (1, [])):
        header["config"]["max_running_requests"] = num_rows
        recorded.write_bytes(msgspec.json.encode(header) + b"\n" + b"".join(lines[1:]))
        assert main([*flags, *by_hand]) == 0
        captured = capsys.readouterr()
        outputs.append(captured.out)
        assert captured.err.startswith("the recorded configuration is used (")
    assert outputs[0] != outputs[1] == outputs[2]


def test_recorded_priorities_are_given_up_for_a_policy_without_them(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = recorded.read_bytes().splitlines(keepends=True)
    header = msgspec.json.decode(lines[0])
    header["config"]["enable_priority_scheduling"] = True
    recorded.write_bytes(msgspec.json.encode(header) + b"\n" + b"".join(lines[1:]))
    assert main(["--trace", str(recorded), "--cost-model", "smollm2_cpu", "--policies", "lpm"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.endswith(", but for --policies, --enable-priority-scheduling")


def test_a_recording_with_rows_that_there_are_not_is_refused(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = recorded.read_bytes().replace(b'"decode_rows":[', b'"decode_rows":[77,')
    recorded.write_bytes(body)
    assert main(["--fit", str(recorded), "--out", str(tmp_path / "x.json"), "--cost-model", "smollm2_cpu"]) == 2
    err = capsys.readouterr().err
    assert "does not fit the recorded rows" in err
    assert err.count("\n") == 1


def test_help_names_the_packaged_cost_models_at_their_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "--cost-model NAME|FILE h200, smollm2_cpu, or a JSON file" in out
    assert "the recorded configuration of the scheduler holds where no flag says otherwise" in out


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--num-requests", "0"], "--num-requests must be at least 1"),
        (["--request-rate", "nan"], "--request-rate: invalid float value"),
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
        (["--fit", "/no/such", "--out", "y", "--cost-model", "h200"], "/no/such: No such file"),
        (["--fit", "x", "--out", "y", "--cost-model", "h200", "--turns", "2"], "--turns does not go with --fit"),
        (
            ["--fit", "x", "--out", "y", "--cost-model", "h200", "--page-size", "1"],
            "--page-size does not go with --fit",
        ),
        (["--fit", "x", "--out", "y"], "--fit needs --cost-model"),
        (["--priority-levels", "3"], "--priority-levels goes with --enable-priority-scheduling"),
        (["--schedule-policy", "lpm"], "did you mean --policies?"),
        (["--schedule-policy=lpm"], "did you mean --policies?"),
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
