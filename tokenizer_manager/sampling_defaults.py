"""The sampling defaults that a model's authors recommend: generation_config.json beside its weights."""

from pathlib import Path

import msgspec

from ..common.flags import ConfigError
from ..common.sampling_params import InvalidParam, SamplingParams, check_sampling_params

OPENAI = SamplingParams()
ANY_VOCABULARY = 2**31


class GenerationConfig(msgspec.Struct):
    """The fields of the file that are taken. Lengths are not: they are the client's to choose."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def find_sampling_defaults(model_path: Path, source: str) -> SamplingParams:
    """The defaults of --sampling-defaults `source`: openai's, or the model's over them. A GGUF file has none.

    ConfigError for a file that can not be used.
    """
    file = model_path / "generation_config.json"
    if source == "openai" or not file.is_file():
        return OPENAI
    try:
        config = msgspec.structs.asdict(msgspec.json.decode(file.read_bytes(), type=GenerationConfig))
        defaults = msgspec.structs.replace(
            OPENAI, **{name: value for name, value in config.items() if value is not None}
        )
        check_sampling_params(defaults, ANY_VOCABULARY)
    except (msgspec.MsgspecError, InvalidParam, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error} (--sampling-defaults openai does without it)") from error
    return defaults


def describe_sampling_defaults(defaults: SamplingParams) -> str:
    """What differs from OpenAI's, for the start-up plan."""
    names = GenerationConfig.__struct_fields__
    changes = {name: getattr(defaults, name) for name in names if getattr(defaults, name) != getattr(OPENAI, name)}
    return ", ".join(f"{name} {value:g}" for name, value in changes.items()) or "OpenAI's"
