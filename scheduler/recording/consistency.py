"""What the types of a recording do not say: ranges of the configuration, and columns that belong together."""

from collections.abc import Iterable

import msgspec

from ...common.batch_messages import BatchResult, PageColumns, ScheduleBatch
from ...common.config import ServerArgs
from ...common.config_checks import check_args
from ...common.flags import ConfigError
from ...common.messages import unpack_int32
from ...common.text_messages import BatchTokenIDOutput
from ..scheduler_config import SchedulerConfig

MOST = 2**31 - 1
OWN_RANGES = {  # fields that are no flags, or whose flag has no upper limit: a scheduler allocates so much
    "num_pages": (1, 2**26),
    "vocab_size": (1, MOST),
    "context_len": (1, MOST),
    "max_running_requests": (1, 2**20),
    "decode_width": (1, 2**10),
}


class InconsistentError(ValueError):
    """The message says which field or which columns are wrong."""


def check_config(config: SchedulerConfig) -> None:
    """InconsistentError for a field out of its range or none of its choices; those of the server's flags hold."""
    for name, (low, high) in OWN_RANGES.items():
        if not low <= getattr(config, name) <= high:
            raise InconsistentError(f"{name} must be from {low} to {high}, not {getattr(config, name)}")
    flags = {field.name for field in msgspec.structs.fields(ServerArgs)}
    values = {field: getattr(config, field) for field in config.__struct_fields__ if field in flags}
    try:
        check_args(ServerArgs(model_path="", **values))
    except ConfigError as error:
        raise InconsistentError(str(error)) from None


def check_columns(message: msgspec.Struct) -> None:
    """InconsistentError where columns of one table have different lengths, or counts do not add up to what they count."""
    if isinstance(message, ScheduleBatch):
        _check_lengths(message, ("extend_rows", "extend_starts", "extend_ends"))
        for group in message.new_pages:
            _check_lengths(group, ("rows", "counts"))
            _check_counts(group, "counts", "page_ids")
    elif isinstance(message, BatchResult):
        _check_lengths(message, ("rows", "generations", "num_tokens", "row_lens", "flags"))
        _check_counts(message, "num_tokens", "token_ids")
    elif isinstance(message, BatchTokenIDOutput):
        _check_lengths(message, ("rids", "generations", "cached_tokens", "num_tokens"))
        _check_counts(message, "num_tokens", "token_ids")


def _check_lengths(table: ScheduleBatch | PageColumns | BatchResult | BatchTokenIDOutput, names: Iterable[str]) -> None:
    lengths = {name: _length(getattr(table, name)) for name in names}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise InconsistentError(f"{type(table).__name__}: columns of different lengths ({told})")


def _check_counts(table: PageColumns | BatchResult | BatchTokenIDOutput, counts_name: str, items_name: str) -> None:
    counts, num_items = unpack_int32(getattr(table, counts_name)), _length(getattr(table, items_name))
    if min(counts, default=0) < 0 or sum(counts) != num_items:
        name = type(table).__name__
        raise InconsistentError(f"{name}: {counts_name} add up to {sum(counts)}, and {items_name} are {num_items}")


def _length(column: bytes | list[str]) -> int:
    return len(column) // 4 if isinstance(column, bytes) else len(column)
