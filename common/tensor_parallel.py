"""How tensors are cut over the tensor-parallel ranks: pure arithmetic, the same on every rank and in the launcher.

Attention is cut in whole KV heads with the query heads that read them, so uneven is fine (3 KV heads over 2 ranks are
2 + 1). More ranks than KV heads are possible where each KV head can be repeated on as many ranks. The MLP is cut in
units of its quantisation block, the vocabulary in equal, padded shares. Names are those of transformers' Llama.
"""

import msgspec

from .model_error import ModelError
from .model_struct import ModelConfig

VOCAB_UNIT = 64


class Range(msgspec.Struct, frozen=True):
    """Indices from `start` up to, not including, `end`."""

    start: int
    end: int

    @property
    def size(self) -> int:
        """How many indices."""
        return self.end - self.start

    def times(self, factor: int) -> "Range":
        """The same range where every index is `factor` wide."""
        return Range(self.start * factor, self.end * factor)


class ShardPlan(msgspec.Struct, frozen=True):
    """What one rank holds. `padded_vocab` is the rows of its embedding table, equal on all ranks."""

    rank: int
    tp_size: int
    heads: Range
    kv_heads: Range
    mlp: Range
    vocab: Range
    padded_vocab: int


class TensorShard(msgspec.Struct, frozen=True):
    """One tensor: its full shape, and the rows (and columns, of a matrix) that a rank holds of it."""

    shape: tuple[int, ...]
    rows: Range
    columns: Range | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return (self.rows.size,) if self.columns is None else (self.rows.size, self.columns.size)


def allowed_tp_sizes(config: ModelConfig) -> list[int]:
    """Every number of ranks that the model can be cut over."""
    up_to_kv_heads = list(range(1, config.num_kv_heads + 1))
    multiples = range(2 * config.num_kv_heads, config.num_heads + 1, config.num_kv_heads)
    sizes = up_to_kv_heads + [size for size in multiples if config.num_heads % size == 0]
    return [size for size in sizes if size <= min(config.intermediate_size, config.vocab_size)]


def check_tp_size(config: ModelConfig, tp_size: int) -> None:
    """Raise ModelError naming --tp-size and the allowed sizes, unless the model can be cut over `tp_size` ranks."""
    allowed = allowed_tp_sizes(config)
    if tp_size not in allowed:
        sizes = ", ".join(map(str, allowed))
        raise ModelError(
            f"--tp-size {tp_size} does not fit {config.num_heads} heads and {config.num_kv_heads} KV heads; "
            f"allowed are {sizes}"
        )


def shard_plan(config: ModelConfig, rank: int, tp_size: int) -> ShardPlan:
    """The part of `rank`. Raises ModelError for a `tp_size` that does not fit."""
    check_tp_size(config, tp_size)
    heads, kv_heads = _head_ranges(config, rank, tp_size)
    padded_vocab = _padded_vocab(config.vocab_size, tp_size)
    vocab = Range(
        min(rank * padded_vocab, config.vocab_size),
        min((rank + 1) * padded_vocab, config.vocab_size),
    )
    return ShardPlan(rank, tp_size, heads, kv_heads, _mlp_range(config, rank, tp_size), vocab, padded_vocab)


def tensor_shards(config: ModelConfig, plan: ShardPlan) -> dict[str, TensorShard]:
    """Every tensor of the model by name, with what this rank holds of it."""
    width = config.hidden_size
    table = TensorShard((config.vocab_size, width), plan.vocab, Range(0, width))
    shards = {"model.embed_tokens.weight": table}
    layer = _attention_shards(config, plan) | _mlp_shards(config, plan) | _norm_shards(config)
    for index in range(config.num_layers):
        shards |= {f"model.layers.{index}.{name}": shard for name, shard in layer.items()}
    shards["model.norm.weight"] = _whole(width)
    if not config.tie_word_embeddings:
        shards["lm_head.weight"] = table
    return shards


def split_evenly(total: int, rank: int, tp_size: int) -> Range:
    """`total` units over the ranks; the first ranks take one more where it does not divide."""
    base, extra = divmod(total, tp_size)
    start = rank * base + min(rank, extra)
    return Range(start, start + base + (rank < extra))


def _head_ranges(config: ModelConfig, rank: int, tp_size: int) -> tuple[Range, Range]:
    group = config.num_heads // config.num_kv_heads
    if tp_size <= config.num_kv_heads:
        kv_heads = split_evenly(config.num_kv_heads, rank, tp_size)
        return kv_heads.times(group), kv_heads
    kv_head = rank // (tp_size // config.num_kv_heads)
    return Range(rank, rank + 1).times(config.num_heads // tp_size), Range(kv_head, kv_head + 1)


def _mlp_range(config: ModelConfig, rank: int, tp_size: int) -> Range:
    """Whole quantisation blocks where there are enough of them; else single columns, which loading repacks."""
    unit = config.mlp_shard_unit
    if config.intermediate_size % unit or config.intermediate_size // unit < tp_size:
        unit = 1
    return split_evenly(config.intermediate_size // unit, rank, tp_size).times(unit)


def _padded_vocab(vocab_size: int, tp_size: int) -> int:
    share = -(-vocab_size // tp_size)
    if tp_size == 1 or share < 4 * VOCAB_UNIT:
        return share
    return -(-share // VOCAB_UNIT) * VOCAB_UNIT


def _whole(size: int) -> TensorShard:
    return TensorShard((size,), Range(0, size))


def _attention_shards(config: ModelConfig, plan: ShardPlan) -> dict[str, TensorShard]:
    width, head_dim = config.hidden_size, config.head_dim
    q, kv = plan.heads.times(head_dim), plan.kv_heads.times(head_dim)
    q_width, kv_width = config.num_heads * head_dim, config.num_kv_heads * head_dim
    everything = Range(0, width)
    shards = {
        "self_attn.q_proj.weight": TensorShard((q_width, width), q, everything),
        "self_attn.k_proj.weight": TensorShard((kv_width, width), kv, everything),
        "self_attn.v_proj.weight": TensorShard((kv_width, width), kv, everything),
        "self_attn.o_proj.weight": TensorShard((width, q_width), everything, q),
    }
    if config.qkv_bias:
        shards["self_attn.q_proj.bias"] = TensorShard((q_width,), q)
        shards["self_attn.k_proj.bias"] = TensorShard((kv_width,), kv)
        shards["self_attn.v_proj.bias"] = TensorShard((kv_width,), kv)
    if config.o_bias:
        shards["self_attn.o_proj.bias"] = _whole(width)
    if config.qk_norm:
        shards["self_attn.q_norm.weight"] = _whole(head_dim)
        shards["self_attn.k_norm.weight"] = _whole(head_dim)
    return shards


def _mlp_shards(config: ModelConfig, plan: ShardPlan) -> dict[str, TensorShard]:
    width, inner = config.hidden_size, config.intermediate_size
    everything = Range(0, width)
    shards = {
        "mlp.gate_proj.weight": TensorShard((inner, width), plan.mlp, everything),
        "mlp.up_proj.weight": TensorShard((inner, width), plan.mlp, everything),
        "mlp.down_proj.weight": TensorShard((width, inner), everything, plan.mlp),
    }
    if config.mlp_bias:
        shards["mlp.gate_proj.bias"] = TensorShard((inner,), plan.mlp)
        shards["mlp.up_proj.bias"] = TensorShard((inner,), plan.mlp)
        shards["mlp.down_proj.bias"] = _whole(width)
    return shards


def _norm_shards(config: ModelConfig) -> dict[str, TensorShard]:
    names = ["input_layernorm", "post_attention_layernorm"]
    if config.post_norms:
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    return {f"{name}.weight": _whole(config.hidden_size) for name in names}
