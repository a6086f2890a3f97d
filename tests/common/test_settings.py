"""Flags before variables before a file before defaults, and vLLM's command line."""

from pathlib import Path

import msgspec
import pytest

from millstream.common.config import ServerArgs
from millstream.common.config_checks import check_args
from millstream.common.flags import ConfigError, Flag, field_of_flag, flags, shown_value
from millstream.common.settings import read_settings, shown_args
from millstream.common.vllm_flags import ALIASES, TRANSLATIONS


def write(folder: Path, text: str) -> str:
    file = folder / "settings.toml"
    file.write_text(text)
    return str(file)


def test_flags_go_before_variables_these_before_a_file_and_all_before_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, 'port = 1\npage-size = 8\nlog_level = "error"\nmax-model-len = 99\n')
    variables = {"MILLSTREAM_PORT": "2", "MILLSTREAM_LOG_LEVEL": "debug", "HOME": "/"}
    settings = read_settings(["m", "--config", file, "--port", "3"], variables)
    args = settings.args
    assert (args.port, args.log_level, args.page_size, args.context_length) == (3, "debug", 8, 99)
    assert args.tp_size == 1
    origins = {"port": "flags", "log_level": "environment", "page_size": file, "context_length": file}
    assert settings.origins.items() >= origins.items()
    assert "tp_size" not in settings.origins
    lines = settings.lines()
    assert lines[f"set by {file}"] == "--page-size 8 --context-length 99"
    assert lines["set by environment"] == "--log-level debug"
    assert {*lines["set by flags"].split()} == {"--model-path", "m", "--config", file, "--port", "3"}


def test_each_line_of_the_plan_is_a_command_line_that_sets_the_same(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        'model-path = "m"\nchunked-prefill-size = "auto"\nserved-model-name = ["a", "b"]\nlog-requests = false\n',
    )
    settings = read_settings([], {"MILLSTREAM_CONFIG": file, "MILLSTREAM_DISABLE_RADIX_CACHE": "on"})
    words = " ".join(settings.lines().values()).split()
    assert read_settings(words, {}).args == settings.args
    assert "auto" in words


@pytest.mark.parametrize("switch", ["1", "true", "ON", "yes"])
def test_a_switch_that_a_variable_set_can_be_undone(switch: str) -> None:
    variables = {"MILLSTREAM_LOG_REQUESTS": switch, "MILLSTREAM_MODEL_PATH": "m"}
    assert read_settings([], variables).args.log_requests
    assert not read_settings(["--no-log-requests"], variables).args.log_requests


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "unknown key prot; did you mean port?"),
        ("[scheduling]\nport = 1", "unknown key scheduling"),
        ("config = 'x'", "config is a flag alone"),
        ("port = '1'", "port must be a whole number, not '1'"),
        ("port = true", "port must be a whole number, not True"),
        ("port = 1.5", "port must be a whole number, not 1.5"),
        ("log-requests = 1", "log-requests must be true or false, not 1"),
        ("drain-timeout = '5'", "drain-timeout must be a number, not '5'"),
        ("chunked-prefill-size = 0", "chunked-prefill-size must be a whole number or 'auto', not 0"),
        ("served-model-name = [1]", "served-model-name must be a list of strings"),
        ("page-size = 8\nblock-size = 8", "block-size is given twice, under two names"),
        ("page-size = 12", "--page-size must be a power of two, not 12 (set by "),
        ("tp-size = 0", "--tp-size must be from 1 to 64, not 0 (set by "),
        ("port = ", "not TOML"),
        ("port = 1\nport = 2", "not TOML"),
        ("a = " + "[" * 5000, "not TOML"),
    ],
)
def test_a_bad_file_is_named_with_its_key(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_settings(["m", "--config", file], {})
    assert file in str(caught.value)
    assert message in str(caught.value)


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    assert read_settings(["m", "--config", write(tmp_path, "\ufeffport = 1")], {}).args.port == 1


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--config /nowhere: No such file"):
        read_settings(["m", "--config", "/nowhere"], {})
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not TOML"):
        read_settings(["m", "--config", str(tmp_path / "binary")], {})


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("PORT", "x", "MILLSTREAM_PORT must be a whole number, not 'x'"),
        ("PORT", "70000", "--port must be from 0 to 65535, not 70000 (set by environment)"),
        ("LOG_REQUESTS", "maybe", "MILLSTREAM_LOG_REQUESTS must be one of 1, true"),
        ("CHUNKED_PREFILL_SIZE", "0", "MILLSTREAM_CHUNKED_PREFILL_SIZE must be a whole number or auto, not '0'"),
        ("DTYPE", "int3", "--dtype must be one of"),
        ("PORT", "3_5", "MILLSTREAM_PORT must be a whole number, not '3_5'"),
        ("PORT", "\u0663\u0665", "MILLSTREAM_PORT must be a whole number"),
        ("HOST", "\udcff", "MILLSTREAM_HOST must be printable text"),
        ("API_KEY", "", "MILLSTREAM_API_KEY is empty, and would leave the server without this key"),
        ("API_KEY_FILE", "", "MILLSTREAM_API_KEY_FILE is empty"),
        ("DRAIN_TIMEOUT", "3_5", "MILLSTREAM_DRAIN_TIMEOUT must be a number, not '3_5'"),
        ("DRAIN_TIMEOUT", "nan", "MILLSTREAM_DRAIN_TIMEOUT must be a number, not 'nan'"),
    ],
)
def test_a_bad_variable_is_named(variable: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(["m"], {f"MILLSTREAM_{variable}": text})
    assert message in str(caught.value)


def test_what_kubernetes_sets_for_a_service_of_our_name_is_no_setting() -> None:
    variables = {
        "MILLSTREAM_PORT": "tcp://10.0.0.1:30000",
        "MILLSTREAM_SERVICE_HOST": "10.0.0.1",
        "MILLSTREAM_SERVICE_PORT": "30000",
        "MILLSTREAM_SERVICE_PORT_HTTP": "30000",
        "MILLSTREAM_PORT_30000_TCP": "tcp://10.0.0.1:30000",
        "MILLSTREAM_PORT_30000_TCP_PROTO": "tcp",
        "MILLSTREAM_PORT_30000_TCP_PORT": "30000",
        "MILLSTREAM_PORT_30000_TCP_ADDR": "10.0.0.1",
    }
    settings = read_settings(["m"], variables)
    assert settings.args.port == 30000
    (notice,) = settings.notices
    assert notice.startswith("MILLSTREAM_PORT=tcp://10.0.0.1:30000 is of a Kubernetes service")


def test_an_unknown_variable_is_a_notice_and_an_empty_one_is_unset() -> None:
    variables = {"MILLSTREAM_PROT": "1", "MILLSTREAM_PORT": "", "MILLSTREAMING": "1", "MILLSTREAM_NOTE": "a\nb"}
    settings = read_settings(["m"], variables)
    assert settings.notices == (
        "MILLSTREAM_PROT is no setting; did you mean MILLSTREAM_PORT?",
        "MILLSTREAM_NOTE is no setting",
    )
    assert settings.args == ServerArgs(model_path="m")


@pytest.mark.parametrize(
    ("argv", "same_as"),
    [
        (["--max_model_len", "64", "--max_num_seqs=7"], ["--context-length", "64", "--max-running-requests", "7"]),
        (["--no-enable-chunked-prefill"], ["--chunked-prefill-size", "-1"]),
        (["--enable-prefix-caching", "--enforce-eager", "--swap-space", "4", "--disable-log-stats"], []),
        (["--no-async-scheduling"], ["--disable-overlap-schedule"]),
        (["--dtype", "half"], ["--dtype", "float16"]),
        (["--served-model-name", "a", "b"], ["--served-model-name", "a,b"]),
        (["--served-model-name", "a", "--served-model-name=b"], ["--served-model-name", "a,b"]),
        (["--disable-log-requests"], []),
        (
            ["--scheduling-policy=priority"],
            ["--enable-priority-scheduling", "--schedule-low-priority-values-first"],
        ),
    ],
)
def test_vllms_command_line_means_the_same_here(argv: list[str], same_as: list[str]) -> None:
    assert read_settings(["m", *argv], {}).args == read_settings(["m", *same_as], {}).args


def test_vllms_flags_are_mapped_with_one_notice_each() -> None:
    argv = ["m", "--max-model-len", "9", "--max-model-len", "8", "--enforce-eager", "--gpu-memory-utilization", "0.5"]
    first, second, third = read_settings(argv, {}).notices
    assert first == "vLLM's --max-model-len is taken as --context-length"
    assert second == "vLLM's --enforce-eager has no effect here"
    assert third.startswith("vLLM's --gpu-memory-utilization is taken as --mem-fraction-static; ")
    assert third.endswith("it is the share of weights and KV cache alone, without activations")
    assert read_settings(["m", "--context-length", "9"], {}).notices == ()


def test_a_value_of_vllms_that_has_no_match_is_refused() -> None:
    with pytest.raises(ConfigError, match="vLLM's --kv-cache-dtype fp8 has no match here, only --kv-cache-dtype auto"):
        read_settings(["m", "--kv-cache-dtype", "fp8"], {})


def test_every_vllm_flag_in_the_tables_leads_to_flags_that_there_are() -> None:
    known = {*field_of_flag(ServerArgs), *("--no-" + name.replace("_", "-") for name in flags(ServerArgs))}
    targets = {
        word
        for translation in TRANSLATIONS.values()
        for words in (translation.ours, *translation.by_value.values())
        for word in words
        if word.startswith("--")
    }
    assert not targets - known
    assert not set(ALIASES) - known
    assert not set(TRANSLATIONS) & set(field_of_flag(ServerArgs))


def test_people_are_shown_words_and_no_secrets() -> None:
    shown = shown_args(check_args(ServerArgs(model_path="m", served_model_name=("a", "b"))))
    assert (shown["chunked_prefill_size"], shown["served_model_name"]) == ("auto", ["a", "b"])
    assert shown_value(Flag("serving", "help", is_secret=True), ("sk-1",)) == "(secret)"
    assert shown_value(Flag("serving", "help", is_secret=True), ()) == ()
    keys = [declared for name, (_, _, declared) in flags(ServerArgs).items() if name.endswith("api_key")]
    assert all(declared.is_secret for declared in keys)
    assert msgspec.json.encode(shown)
