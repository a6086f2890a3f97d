"""The command line and its errors."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

import millstream
from millstream.common.command_line import make_parser
from millstream.common.config import ServerArgs
from millstream.common.config_checks import check_args
from millstream.common.flags import ConfigError, flag_name, flags
from millstream.common.settings import read_settings

ENVIRONMENT = {"PYTHONPATH": str(Path(next(iter(millstream.__path__))).parent)}


def parse_args(argv: list[str]) -> ServerArgs:
    return read_settings(argv, {}).args


def test_the_model_may_stand_alone_or_behind_its_flag() -> None:
    assert parse_args(["smollm2"]) == parse_args(["--model-path", "smollm2"]) == parse_args(["--model=smollm2"])


def test_flags_have_sglangs_names_and_vllms_aliases() -> None:
    args = parse_args(
        ["m", "--tensor-parallel-size", "2", "--max-num-seqs", "7", "--max-model-len", "99", "--block-size=32"]
    )
    assert (args.tp_size, args.max_running_requests, args.context_length, args.page_size) == (2, 7, 99, 32)


def test_every_field_is_a_flag_with_help_in_a_group() -> None:
    text = make_parser().format_help()
    assert not [name for name in flags(ServerArgs) if flag_name(name) not in text]
    assert not [name for name, (_, _, declared) in flags(ServerArgs).items() if not declared.help]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "no model is given"),
        (["m", "--prot", "1"], "unknown argument --prot; did you mean --port?"),
        (["m", "--tp-sise=2"], "unknown argument --tp-sise; did you mean --tp-size?"),
        (["m", "--zzzz"], "unknown argument --zzzz; see --help"),
        (["m", "n"], "unknown argument n"),
        (["m", "--model-path", "n"], "MODEL is given twice"),
        (["m", "--port", "x"], "--port"),
        (["m", "--port", "70000"], "--port must be from 0 to 65535, not 70000"),
        (["m", "--page-size", "12"], "--page-size must be a power of two"),
        (["m", "--page-size", "0"], "--page-size"),
        (["m", "--tp-size", "0"], "--tp-size"),
        (["m", "--chunked-prefill-size", "0"], "--chunked-prefill-size"),
        (["m", "--mem-fraction-static", "nan"], "--mem-fraction-static"),
        (["m", "--mem-fraction-static", "1.5"], "--mem-fraction-static"),
        (["m", "--drain-timeout", "inf"], "--drain-timeout"),
        (["m", "--dtype", "int3"], "--dtype"),
        (["m", "--quantization", "int3"], "--quantization"),
        (["m", "--quantization", "int8", "--device", "cuda"], "--quantization int8 is not built for --device cuda yet"),
        (["m", "-q", "int8", "--kernel-backend", "torch"], "--quantization int8 needs the C operators"),
        (["m", "--max-total-tokens", "8"], "--max-total-tokens"),
        (["m", "--schedule-policy", "best"], "--schedule-policy"),
        (["m", "--schedule-policy", "lpm", "--disable-radix-cache"], "--schedule-policy lpm needs the cache"),
        (["m", "--schedule-policy", "lpm", "--enable-priority-scheduling"], "goes with fcfs and lof, not lpm"),
        (["m", "--schedule-low-priority-values-first"], "needs --enable-priority-scheduling"),
    ],
)
def test_a_bad_command_line_names_what_is_wrong(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_args(argv)
    assert message in str(caught.value)


def test_args_built_in_code_are_checked_too() -> None:
    with pytest.raises(ConfigError, match="--device must be one of auto, cpu, cuda, not 'tpu'"):
        check_args(ServerArgs(model_path="m", device="tpu"))


def run(*argv: str) -> tuple[int, str, str, float]:
    start = time.monotonic()
    command = [sys.executable, "-P", "-m", "millstream", *argv]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr, time.monotonic() - start


def test_version_answers_at_once() -> None:
    code, out, _, seconds = run("--version")
    assert (code, out) == (0, f"millstream {millstream.__version__}\n")
    assert seconds < 3 * 0.2


def test_help_answers_soon_and_is_grouped() -> None:
    code, out, _, seconds = run("serve", "--help")
    assert code == 0
    assert [title for title in ("model:", "serving:", "scheduling:", "KV cache and memory:") if title not in out] == []
    assert seconds < 3 * 0.4


def test_an_unknown_command_suggests_the_nearest() -> None:
    code, _, err, _ = run("sevre")
    assert code == 2
    assert "did you mean serve?" in err


def test_a_command_line_error_is_one_line_with_exit_code_2() -> None:
    code, _, err, _ = run("serve", "smollm2", "--tp-size", "0")
    assert (code, err) == (2, "millstream: error: --tp-size must be from 1 to 64, not 0\n")


BROKEN_PIPE = """
import sys, types
from millstream.__main__ import COMMANDS, main

def write_on(argv):
    while True:
        print("line", flush=True)

sys.modules["writer"] = types.SimpleNamespace(write_on=write_on)
COMMANDS["write"] = ("writer:write_on", "")
sys.exit(main(["write"]))
"""


def test_output_that_nobody_reads_any_more_ends_a_command_quietly() -> None:
    command = [sys.executable, "-c", BROKEN_PIPE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"line\n"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141
