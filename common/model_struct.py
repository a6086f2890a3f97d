"""What the one decoder needs to know of a model, the same for every family and file format."""

import msgspec

from .model_error import ModelError

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"

QUANTISATION_GROUP = 32  # columns that share a scale, here and in GGUF's plain quantised types
MAX_VOCAB = 2**22
MAX_WIDTH = 2**20
MAX_LAYERS = 1024
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_CONTEXT = 2**27


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embeddings of one kind of layer: `rope_type` is default, linear, llama3 or yarn.

    The other fields are those of transformers' ROPE_INIT_FUNCTIONS, with their defaults filled in.
    `attention_factor` multiplies cos and sin (yarn).
    """

    rope_type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer. Shapes are the model's own, before any split over ranks."""

    architecture: str
    model_type: str
    weight_format: str  # safetensors or gguf
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    local_rope: RopeConfig | None = None  # of sliding layers, where it differs
    sliding_window: int | None = None  # a token sees itself and the `sliding_window - 1` before it
    layer_types: tuple[str, ...]
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"  # or gelu_tanh
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False  # Gemma 3: norms after attention and MLP too
    embed_scale: float = 1.0
    attention_scale: float
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    mlp_shard_unit: int = QUANTISATION_GROUP  # quantisation block of the MLP's inner dimension
    stored_types: dict[str, str] = {}  # how a GGUF file stores each tensor, by transformers' names: F32, Q4_1 ...
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str | None = None  # what the weights were saved in, where the file says so

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model; tied embeddings count once."""
        width, inner = self.hidden_size, self.intermediate_size
        q_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = 2 * width * (q_width + kv_width)
        attention += self.qkv_bias * (q_width + 2 * kv_width) + self.o_bias * width + self.qk_norm * 2 * self.head_dim
        mlp = 3 * width * inner + self.mlp_bias * (2 * inner + width)
        norms = (4 if self.post_norms else 2) * width
        tables = self.vocab_size * width * (1 if self.tie_word_embeddings else 2)
        return tables + self.num_layers * (attention + mlp + norms) + width

    def kv_bytes_per_token(self, element_bytes: int, num_kv_heads: int | None = None) -> int:
        """Bytes of keys and values that one token adds over all layers, for `num_kv_heads` of them (default: all)."""
        heads = self.num_kv_heads if num_kv_heads is None else num_kv_heads
        return 2 * self.num_layers * heads * self.head_dim * element_bytes


def check_model_config(config: ModelConfig, source: str) -> ModelConfig:
    """Raise ModelError if fields contradict each other; returns the config."""
    if config.num_heads % config.num_kv_heads:
        raise ModelError(f"{source}: {config.num_heads} heads cannot share {config.num_kv_heads} KV heads evenly")
    if config.head_dim % 2:
        raise ModelError(f"{source}: the head dimension {config.head_dim} is odd; rotary embeddings need pairs")
    if len(config.layer_types) != config.num_layers:
        raise ModelError(f"{source}: {len(config.layer_types)} layer types for {config.num_layers} layers")
    unknown = set(config.layer_types) - {FULL_ATTENTION, SLIDING_ATTENTION}
    if unknown:
        raise ModelError(f"{source}: unknown layer types {', '.join(sorted(unknown))}")
    if SLIDING_ATTENTION in config.layer_types and config.sliding_window is None:
        raise ModelError(f"{source}: there are sliding layers, but no sliding_window")
    for token_id in (*config.eos_token_ids, *([] if config.bos_token_id is None else [config.bos_token_id])):
        if not 0 <= token_id < config.vocab_size:
            raise ModelError(f"{source}: special token {token_id} is not in the vocabulary of {config.vocab_size}")
    return config
