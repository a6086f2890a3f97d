"""vLLM's command line, understood: its names of our flags, and the flags that mean something else or nothing here."""

from typing import NamedTuple

from .config import ServerArgs
from .flags import ConfigError, field_of_flag, flag_name

# vLLM's names that are aliases of flags of ours -> what is different, if anything.
ALIASES = {
    "--max-model-len": "",
    "--max-num-seqs": "",
    "--max-num-batched-tokens": "it bounds the prompt tokens of a step, not its decode rows",
    "--block-size": "",
    "--gpu-memory-utilization": "it is the share of weights and KV cache alone, without activations",
    "--tensor-parallel-size": "",
    "--no-enable-prefix-caching": "",
    "--seed": "",
}


class Translation(NamedTuple):
    """What stands here in a vLLM flag's place: `by_value` for one with a value ("*" for any), else `ours`."""

    ours: tuple[str, ...] = ()
    by_value: dict[str, tuple[str, ...]] = {}


NOTHING = Translation()
NO_VALUE_MATTERS = Translation(by_value={"*": ()})
TRANSLATIONS = {
    "--enable-prefix-caching": Translation(("--no-disable-radix-cache",)),
    "--enable-chunked-prefill": NOTHING,
    "--no-enable-chunked-prefill": Translation(("--chunked-prefill-size", "-1")),
    "--async-scheduling": Translation(("--no-disable-overlap-schedule",)),
    "--no-async-scheduling": Translation(("--disable-overlap-schedule",)),
    "--scheduling-policy": Translation(
        by_value={
            "fcfs": ("--schedule-policy", "fcfs"),
            "priority": ("--enable-priority-scheduling", "--schedule-low-priority-values-first"),
        }
    ),
    "--enable-log-requests": Translation(("--log-requests",)),
    "--no-enable-log-requests": Translation(("--no-log-requests",)),
    "--disable-log-requests": Translation(("--no-log-requests",)),
    "--disable-log-stats": NOTHING,
    "--enforce-eager": NOTHING,
    "--trust-remote-code": NOTHING,
    "--enable-auto-tool-choice": NOTHING,
    "--enable-server-load-tracking": NOTHING,
    "--enable-prompt-tokens-details": NOTHING,
    "--enable-force-include-usage": NOTHING,
    "--enable-request-id-headers": NOTHING,
    "--disable-frontend-multiprocessing": NOTHING,
    "--disable-uvicorn-access-log": NOTHING,
    "--swap-space": NO_VALUE_MATTERS,
    "--max-logprobs": NO_VALUE_MATTERS,
    "--max-seq-len-to-capture": NO_VALUE_MATTERS,
    "--distributed-executor-backend": NO_VALUE_MATTERS,
    "--guided-decoding-backend": NO_VALUE_MATTERS,
    "--kv-cache-dtype": Translation(by_value={"auto": ()}),
    "--tokenizer-mode": Translation(by_value={"auto": ()}),
    "--chat-template-content-format": Translation(by_value={"auto": (), "string": ()}),
    "--pipeline-parallel-size": Translation(by_value={"1": ()}),
    "--data-parallel-size": Translation(by_value={"1": ()}),
    "--runner": Translation(by_value={"auto": (), "generate": ()}),
    "--generation-config": Translation(
        by_value={"auto": ("--sampling-defaults", "model"), "vllm": ("--sampling-defaults", "openai")}
    ),
    "--uvicorn-log-level": Translation(
        by_value={name: ("--log-level", name) for name in ("debug", "info", "warning", "error")}
    ),
}
DTYPES = {"half": "float16", "float": "float32"}


def translate_vllm_flags(argv: list[str]) -> tuple[list[str], list[str]]:
    """The command line in our flags, and a notice for each flag of vLLM's; ConfigError for a value that has no match."""
    fields = field_of_flag(ServerArgs)
    words = iter(_join_names(argv))
    translated: list[str] = []
    notices: dict[str, None] = {}
    for word in words:
        name, equals, value = _split(word)
        translation = TRANSLATIONS.get(name)
        if name in fields or translation is None:
            if name in ALIASES:
                notices[_notice(name, (flag_name(fields[name]),), ALIASES[name])] = None
            translated.append(name + equals + value)
        elif not translation.by_value:
            notices[_notice(name, translation.ours)] = None
            translated += translation.ours
        else:
            value = value if equals else next(words, "")
            ours = _by_value(name, value, translation.by_value)
            notices[_notice(f"{name} {value}", ours)] = None
            translated += ours
    return _translate_dtype(translated), list(notices)


def _split(word: str) -> tuple[str, str, str]:
    """Name, "=" and value of a flag; vLLM takes underscores for dashes. Other words stay whole."""
    if not word.startswith("--"):
        return word, "", ""
    name, equals, value = word.partition("=")
    return name.replace("_", "-"), equals, value


def _by_value(name: str, value: str, by_value: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    ours = by_value.get(value, by_value.get("*"))
    if ours is None:
        raise ConfigError(f"vLLM's {name} {value} has no match here, only {name} {' or '.join(by_value)}")
    return ours


def _notice(theirs: str, ours: tuple[str, ...], difference: str = "") -> str:
    text = f"is taken as {' '.join(ours)}" if ours else "has no effect here"
    return f"vLLM's {theirs} {text}" + (f"; {difference}" if difference else "")


def _translate_dtype(argv: list[str]) -> list[str]:
    """vLLM's other words for types."""
    return [
        DTYPES.get(word, word) if before == "--dtype" else word for before, word in zip(["", *argv], argv, strict=False)
    ]


def _join_names(argv: list[str]) -> list[str]:
    """vLLM's `MODEL --served-model-name A B` with commas: where MODEL stands in front, both are names."""
    if "--served-model-name" not in argv[1:] or argv[0].startswith("-"):
        return argv
    start = argv.index("--served-model-name") + 1
    end = next((index for index in range(start, len(argv)) if argv[index].startswith("-")), len(argv))
    return [*argv[:start], ",".join(argv[start:end]), *argv[end:]]
