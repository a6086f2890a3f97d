"""The model that a command line asks for: found, checked, and described before anything is allocated."""

import logging
import secrets
from pathlib import Path

import msgspec

from ..common.config import AUTO_CHUNK, ServerArgs
from ..common.cpu import has_c_compiler, multiplies_bfloat16
from ..common.flags import ConfigError
from ..common.hf_config import code_fields
from ..common.memory_plan import available_host_memory, plan_kv_pages
from ..common.model_config import load_model_config
from ..common.model_path import find_model, model_name
from ..common.model_struct import ModelConfig
from ..common.sampling_params import SamplingParams
from ..common.tensor_parallel import check_tp_size, shard_plan
from ..common.tokenizer import load_chat_templates
from ..common.tokenizer_parts import DEFAULT_TEMPLATE
from ..common.weight_plan import WeightPlan, plan_weights, resolve_quantization, weight_lines
from .chat.chat_family import ChatFamily, find_chat_family
from .sampling_defaults import describe_sampling_defaults, find_sampling_defaults

logger = logging.getLogger(__name__)

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class ServedModel(msgspec.Struct, frozen=True):
    """What is served: arguments with every "auto" resolved, the files, the model's shape, its public names."""

    args: ServerArgs
    path: Path
    config: ModelConfig
    names: tuple[str, ...]
    chat_templates: dict[str, str]  # the model's, or that of --chat-template
    family: ChatFamily
    weights: WeightPlan
    sampling_defaults: SamplingParams

    @property
    def name(self) -> str:
        """The name that answers bear."""
        return self.names[0]

    @property
    def kv_bytes_per_token(self) -> int:
        """Over all ranks together."""
        return _kv_bytes_per_token(self.args, self.config)

    def plan(self, url: str) -> dict[str, str]:
        """The start-up plan, as name -> value."""
        args, config = self.args, self.config
        tokens = f"{args.max_total_tokens:,}" if args.max_total_tokens else "what the GPUs leave, known after loading"
        return {
            "model": f"{', '.join(self.names)} ({self.path})",
            "architecture": config.architecture,
            "parameters": f"{config.num_parameters / 1e6:,.1f} M",
            "dtype": args.dtype,
            **weight_lines(self.weights),
            "KV bytes a token": f"{self.kv_bytes_per_token:,}",
            "KV tokens": tokens,
            "context": f"{args.context_length:,}",
            "max running requests": f"{args.max_running_requests:,}",
            "tool call parser": self.family.tool_call_parser
            + (
                ""
                if self.family.habits.takes_tools
                else " (the chat template knows no tools: a system message shows them)"
            ),
            "reasoning parser": self.family.reasoning_parser,
            "chunk size": {-1: "off", AUTO_CHUNK: "auto"}.get(
                args.chunked_prefill_size, f"{args.chunked_prefill_size:,}"
            ),
            "page size": f"{args.page_size}",
            "tp size": f"{args.tp_size}",
            "device": args.device,
            "sampling defaults": describe_sampling_defaults(self.sampling_defaults),
            "listening on": url,
        }


def find_served_model(args: ServerArgs) -> ServedModel:
    """Find and read the model's description. ConfigError or ModelError, in one line, for what the user must change."""
    path = find_model(args.model_path)
    config = load_model_config(path, args.load_format)
    for field in code_fields(path):
        logger.warning("config.json: %s is ignored: no code of a model runs here", field)
    check_tp_size(config, args.tp_size)
    args, weights = _resolve(args, config)
    templates, family = _find_chats(args, path)
    if args.record_schedule is not None:
        _check_new_file("--record-schedule", Path(args.record_schedule))
    names = args.served_model_name or (model_name(args.model_path),)
    defaults = find_sampling_defaults(path, args.sampling_defaults)
    return ServedModel(args, path, config, names, templates, family, weights, defaults)


def _resolve(args: ServerArgs, config: ModelConfig) -> tuple[ServerArgs, WeightPlan]:
    """Replace every "auto" by what it means here, where the children see only the result; and plan the weights."""
    context = args.context_length or config.max_position_embeddings
    if context > config.max_position_embeddings:
        raise ConfigError(f"--context-length {context} is more than the model's {config.max_position_embeddings}")
    device = args.device if args.device != "auto" else _find_device()
    if device == "cuda" and args.tp_size > _num_gpus():
        raise ConfigError(f"--device cuda with --tp-size {args.tp_size}: this machine has {_num_gpus()} NVIDIA GPUs")
    dtype = args.dtype if args.dtype != "auto" else _find_dtype(device)
    quantization, why_none = resolve_quantization(args, device, dtype, has_c_compiler())
    seed = secrets.randbelow(2**31) if args.random_seed is None else args.random_seed
    args = msgspec.structs.replace(
        args,
        context_length=context,
        device=device,
        dtype=dtype,
        quantization=quantization,
        random_seed=seed,
    )
    available_bytes = available_host_memory() if device == "cpu" else 0
    weights = plan_weights(config, args, ELEMENT_BYTES[dtype], _kv_bytes_per_token(args, config), available_bytes)
    weights = msgspec.structs.replace(weights, why_none=why_none)
    if device == "cpu":
        max_total_tokens = _plan_host_kv(args, config, weights, available_bytes)
        args = msgspec.structs.replace(args, max_total_tokens=max_total_tokens)
    return args, weights


def _plan_host_kv(args: ServerArgs, config: ModelConfig, weights: WeightPlan, available_bytes: int) -> int:
    kv_bytes_per_token = _kv_bytes_per_token(args, config)
    asked_bytes = (args.max_total_tokens or 0) * kv_bytes_per_token
    if asked_bytes > available_bytes:
        sizes = f"{asked_bytes / 1e6:,.0f} MB, and {available_bytes / 1e6:,.0f} MB are free"
        raise ConfigError(f"--max-total-tokens {args.max_total_tokens} takes {sizes}")
    num_pages = plan_kv_pages(
        args,
        device="cpu",
        kv_bytes_per_token=kv_bytes_per_token,
        weight_bytes=weights.num_bytes(),
        context_len=args.context_length or config.max_position_embeddings,
        available_bytes=available_bytes,
    )
    return num_pages * args.page_size


def _kv_bytes_per_token(args: ServerArgs, config: ModelConfig) -> int:
    shards = [shard_plan(config, rank, args.tp_size) for rank in range(args.tp_size)]
    num_kv_heads = sum(shard.kv_heads.size for shard in shards)
    return config.kv_bytes_per_token(ELEMENT_BYTES[args.dtype], num_kv_heads)


def _find_device() -> str:
    return "cuda" if _num_gpus() else "cpu"


def _num_gpus() -> int:
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _find_dtype(device: str) -> str:
    return "bfloat16" if device == "cuda" or multiplies_bfloat16() else "float32"


def _find_chats(args: ServerArgs, path: Path) -> tuple[dict[str, str], ChatFamily]:
    """The chat templates, and what they tell of the model's answers."""
    found = load_chat_templates(path)
    templates = _read_template(args.chat_template) if args.chat_template else dict(found.chat_templates)
    parsers = args.tool_call_parser, args.reasoning_parser
    return templates, find_chat_family(templates, *parsers, found.response_template)


def _read_template(file: str) -> dict[str, str]:
    try:
        return {DEFAULT_TEMPLATE: Path(file).read_text(encoding="utf-8")}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {file}: {error}") from error


def _check_new_file(flag: str, path: Path) -> None:
    """ConfigError unless the file can be made: it must not exist, and never replaces another."""
    try:
        path.touch(mode=0o600, exist_ok=False)
        path.unlink()
    except FileExistsError:
        raise ConfigError(f"{flag} {path}: the file exists already") from None
    except OSError as error:
        raise ConfigError(f"{flag} {path}: the file can not be made ({error.strerror})") from error
