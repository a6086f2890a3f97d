"""How each linear layer is kept in memory: pure arithmetic, the same in the start-up plan and on every rank.

A quantised copy serves steps of few tokens, whose time is that of reading the weights; a dense copy of the same values
serves the others, where memory allows both. A GGUF file's plain quantised types stay as they are stored.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from .config import ServerArgs
from .cpu import C_COMPILERS
from .flags import ConfigError
from .memory_plan import plan_kv_pages
from .model_struct import QUANTISATION_GROUP, ModelConfig
from .tensor_parallel import ShardPlan, TensorShard, shard_plan, tensor_shards

DENSE, INT4, INT8, W8A8 = "dense", "int4", "int8", "w8a8"
AUTO, NONE = "auto", "none"
STORED_FORMATS = {"Q4_0": INT4, "Q4_1": INT4, "Q8_0": INT8}
GROUP_BYTES = {INT4: QUANTISATION_GROUP // 2 + 4, INT8: QUANTISATION_GROUP + 2}  # values and float16 scales
W8A8_ROW_BYTES = 8  # a scale and a sum
W8A8_UNIT = 4  # columns that one instruction takes
BOTH_COPIES_SHARE = 0.5  # of what the KV cache leaves
NO_COMPILER = f"no C compiler found ({', '.join(C_COMPILERS)})"


class LinearPlan(msgspec.Struct, frozen=True):
    """One linear layer of one rank: the weights `names`, one below the other.

    `is_stored` says that the file's own quantised values are taken, `why` why a layer is dense that could be expected
    not to be.
    """

    names: tuple[str, ...]
    num_rows: int
    num_columns: int
    format: str
    is_stored: bool = False
    why: str = ""

    def quantised_bytes(self) -> int:
        """Of the quantised copy, 0 where there is none."""
        if self.format == W8A8:
            return self.num_rows * (self.num_columns + W8A8_ROW_BYTES)
        return self.num_rows * (self.num_columns // QUANTISATION_GROUP) * GROUP_BYTES.get(self.format, 0)

    def dense_bytes(self, element_bytes: int, keeps_dense: bool) -> int:
        """Of the dense copy, where there is one."""
        is_kept = self.format == DENSE or (keeps_dense and self.format != W8A8)
        return is_kept * self.num_rows * self.num_columns * element_bytes


class WeightPlan(msgspec.Struct, frozen=True):
    """The weights of all ranks together, and whether layers with a quantised copy have a dense one too."""

    linears: list[LinearPlan]
    other_bytes: int
    element_bytes: int
    keeps_dense: bool = True
    left_bytes: int = 0  # what the KV cache leaves to the weights and everything else
    why_none: str = ""  # why "auto" quantises nothing

    def num_bytes(self) -> int:
        """What is kept, without the padding of packed rows."""
        return self.other_bytes + self.quantised_bytes() + self.dense_bytes()

    def quantised_bytes(self) -> int:
        """All quantised copies."""
        return sum(linear.quantised_bytes() for linear in self.linears)

    def dense_bytes(self) -> int:
        """All dense copies."""
        return sum(linear.dense_bytes(self.element_bytes, self.keeps_dense) for linear in self.linears)


def resolve_quantization(args: ServerArgs, device: str, dtype: str, has_compiler: bool) -> tuple[str, str]:
    """What `--quantization` means on this device, in this resolved dtype, and why "auto" means none on CPU.

    ConfigError where it asks for too much.
    """
    asked = args.quantization not in (AUTO, NONE)
    if device != "cpu":
        if asked:
            raise ConfigError(
                f"--quantization {args.quantization} is not built for --device {device} yet, only for cpu"
            )
        return NONE, ""
    if asked and dtype == "float16":
        raise ConfigError(f"--quantization {args.quantization} needs --dtype bfloat16 or float32 on CPU, not float16")
    if asked and not has_compiler:
        raise ConfigError(f"--quantization {args.quantization} needs the C operators: {NO_COMPILER}")
    if args.quantization != AUTO:
        return args.quantization, ""
    why_none = _why_none(args, dtype, has_compiler)
    if why_none:
        return NONE, why_none
    return INT8 if args.dtype == AUTO and dtype == "float32" else AUTO, ""


def plan_linears(config: ModelConfig, plan: ShardPlan, quantization: str) -> dict[str, LinearPlan]:
    """The linear layers of one rank by the name of their first weight; `quantization` is what the flag says."""
    shards = tensor_shards(config, plan)
    linears: dict[str, LinearPlan] = {}
    for names in _linear_names(config):
        is_head = len(linears) == 4 * config.num_layers
        num_rows = plan.padded_vocab if is_head else sum(shards[name].rows.size for name in names)
        columns = shards[names[0]].columns
        assert columns is not None
        form, is_stored, why = _choose(config, names, quantization, is_head, shards[names[0]])
        linears[names[0]] = LinearPlan(names, num_rows, columns.size, form, is_stored, why)
    return linears


def plan_weights(
    config: ModelConfig, args: ServerArgs, element_bytes: int, kv_bytes_per_token: int, available_bytes: int
) -> WeightPlan:
    """The weights of all ranks of a host whose `available_bytes` they share; `args` are resolved.

    Both copies are kept where they take at most half of what the KV cache leaves.
    """
    plans = [shard_plan(config, rank, args.tp_size) for rank in range(args.tp_size)]
    linears = [linear for plan in plans for linear in plan_linears(config, plan, args.quantization).values()]
    other_bytes = sum(_other_bytes(config, plan, element_bytes) for plan in plans)
    both = WeightPlan(linears, other_bytes, element_bytes)
    left_bytes = available_bytes - _kv_bytes(args, both.num_bytes(), kv_bytes_per_token, available_bytes)
    keeps_dense = both.num_bytes() <= BOTH_COPIES_SHARE * left_bytes
    return msgspec.structs.replace(both, keeps_dense=keeps_dense, left_bytes=left_bytes)


def rank_bytes(
    config: ModelConfig, plan: ShardPlan, linears: Iterable[LinearPlan], element_bytes: int, keeps_dense: bool
) -> int:
    """The weights of one rank, without the padding of packed rows."""
    other_bytes = _other_bytes(config, plan, element_bytes)
    return WeightPlan(list(linears), other_bytes, element_bytes, keeps_dense).num_bytes()


def weight_lines(plan: WeightPlan) -> dict[str, str]:
    """The start-up plan's lines about weights."""
    lines = {"weights": f"{_mb(plan.num_bytes())} (embeddings and norms: {_mb(plan.other_bytes)})"}
    quantised = [linear for linear in plan.linears if linear.format != DENSE]
    if quantised:
        formats = _count_layers((f"{each.format}{', as stored' if each.is_stored else ''}", each) for each in quantised)
        counts = "; ".join(f"{count} layer{'s' * (count != 1)} {form}" for form, count in sorted(formats.items()))
        lines["quantised layers"] = f"{_mb(plan.quantised_bytes())} ({counts})"
    if len(quantised) < len(plan.linears) or quantised[0].format != W8A8:
        lines["dense layers"] = _dense_line(plan, quantised)
    others = [linear for linear in plan.linears if linear.why]
    if others:
        reasons = _count_layers((each.why, each) for each in others)
        text = "; ".join(f"{count}: {why}" for why, count in reasons.items())
        lines["dequantised layers"] = (
            f"{sum(reasons.values())} of {len({each.names for each in plan.linears})} ({text})"
        )
    return lines


def _count_layers(labelled: Iterable[tuple[str, LinearPlan]]) -> Counter[str]:
    """Layers by label; one that several ranks share counts once for a label."""
    return Counter(label for label, _ in {(label, each.names): each for label, each in labelled})


def _why_none(args: ServerArgs, dtype: str, has_compiler: bool) -> str:
    """Only C code multiplies packed weights."""
    if args.kernel_backend == "torch":
        return "--kernel-backend torch switches the C operators off"
    if dtype == "float16":
        return "no C operator takes float16"
    return "" if has_compiler else NO_COMPILER


def _dense_line(plan: WeightPlan, quantised: list[LinearPlan]) -> str:
    both = msgspec.structs.replace(plan, keeps_dense=True)
    if all(linear.format in (DENSE, W8A8) for linear in quantised):
        return _mb(plan.dense_bytes()) + (f"; none is quantised: {plan.why_none}" if plan.why_none else "")
    limit = f"half of the {_mb(plan.left_bytes)} that the KV cache leaves"
    if plan.keeps_dense:
        return f"{_mb(plan.dense_bytes())}, a second copy for steps of many tokens: all weights fit in {limit}"
    return (
        f"{_mb(plan.dense_bytes())}, no second copy: all weights would take {_mb(both.num_bytes())}, more than {limit}"
    )


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f} MB"


def _linear_names(config: ModelConfig) -> Iterator[tuple[str, ...]]:
    """The weights of each linear layer, those of a fused one together; lm_head comes last."""
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        for parts in ("self_attn.q self_attn.k self_attn.v", "self_attn.o", "mlp.gate mlp.up", "mlp.down"):
            yield tuple(f"{prefix}{part}_proj.weight" for part in parts.split())
    yield ("model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight",)


def _choose(
    config: ModelConfig, names: tuple[str, ...], quantization: str, is_head: bool, shard: TensorShard
) -> tuple[str, bool, str]:
    """(format, whether the file has it, why not)."""
    assert shard.columns is not None
    if quantization == W8A8:
        fits = shard.columns.size % W8A8_UNIT == 0
        return (W8A8, False, "") if fits else (DENSE, False, f"inputs are no multiple of {W8A8_UNIT}")
    stored = {STORED_FORMATS.get(config.stored_types.get(name, ""), DENSE) for name in names}
    form = _asked_format(stored, quantization, is_head)
    if quantization == AUTO and len(stored) > 1:
        return DENSE, False, "fused from types that differ"
    if form != DENSE and (shard.columns.start % QUANTISATION_GROUP or shard.columns.size % QUANTISATION_GROUP):
        return DENSE, False, f"inputs are cut inside a group of {QUANTISATION_GROUP}"
    return form, stored == {form} and form != DENSE, ""


def _asked_format(stored: set[str], quantization: str, is_head: bool) -> str:
    """int8 keeps what is stored in 4 bits; int4 keeps lm_head in 8, which costs more quality than the rest."""
    if quantization == AUTO:
        return next(iter(stored))
    if quantization == NONE:
        return DENSE
    if stored == {INT4} or (quantization == INT4 and not is_head):
        return INT4
    return INT8


def _other_bytes(config: ModelConfig, plan: ShardPlan, element_bytes: int) -> int:
    """The embedding table, norms and biases of a rank."""
    vectors = [shard.rows.size for shard in tensor_shards(config, plan).values() if shard.columns is None]
    return (plan.padded_vocab * config.hidden_size + sum(vectors)) * element_bytes


def _kv_bytes(args: ServerArgs, weight_bytes: int, kv_bytes_per_token: int, available_bytes: int) -> int:
    """What the KV cache would take beside both copies; everything, where it finds no room there."""
    try:
        num_pages = plan_kv_pages(
            args,
            device="cpu",
            kv_bytes_per_token=kv_bytes_per_token,
            weight_bytes=weight_bytes,
            context_len=args.context_length or 0,
            available_bytes=available_bytes,
        )
    except ConfigError:
        return available_bytes
    return num_pages * args.page_size * kv_bytes_per_token
