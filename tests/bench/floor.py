"""The floor: how long work must take on a machine at the least, from a model's sizes and two measured rates.

An operator takes at least the larger of its arithmetic over the matrix rate and its bytes, as they are stored, over the
memory rate. The floor of a step is the sum over its operators, that of a workload the sum over its parts. Pure
arithmetic; tests/bench/machine.py measures the rates.
"""

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from millstream.common.model_struct import ModelConfig

LINEAR, ATTENTION, OTHER, SAMPLING = "linear", "attention", "other", "sampling"


@dataclass(frozen=True)
class Rates:
    """What the machine reaches, with all threads: bytes read, bf16 FLOPs and int8 operations in a second."""

    memory: float
    bf16: float
    int8: float


def median_rates(measured: Iterable[Rates]) -> Rates:
    """The median of each."""
    columns = zip(*((each.memory, each.bf16, each.int8) for each in measured), strict=True)
    return Rates(*map(statistics.median, columns))


@dataclass(frozen=True)
class WeightFormat:
    """How the weights of the linear layers are stored; `is_int8` where activations are quantised too."""

    name: str
    bytes_per_weight: float
    is_int8: bool = False


FORMATS = {
    each.name: each
    for each in (
        WeightFormat("bf16", 2.0),
        WeightFormat("int8", 1 + 2 / 32),  # a float16 scale for 32 weights
        WeightFormat("int4", 0.5 + 4 / 32),  # a float16 scale and minimum for 32 weights
        WeightFormat("w8a8", 1 + 8 / 576, is_int8=True),  # a float32 scale and an int32 sum for an output's inputs
    )
}


@dataclass(frozen=True)
class Linear:
    """A matrix product of the model."""

    name: str
    out_features: int
    in_features: int

    @property
    def num_weights(self) -> int:
        return self.out_features * self.in_features


@dataclass(frozen=True)
class Work:
    """Something that is computed: FLOPs (a multiplication and an addition are two) and bytes that it must touch."""

    name: str
    kind: str
    flops: float
    num_bytes: float
    is_int8: bool = False

    def seconds(self, rates: Rates) -> float:
        """The least that it takes."""
        return max(self.flops / (rates.int8 if self.is_int8 else rates.bf16), self.num_bytes / rates.memory)


@dataclass(frozen=True)
class Requests:
    """`concurrency` requests of one shape that run side by side; the first `shared_len` prompt tokens are cached."""

    concurrency: int
    prompt_len: int
    output_len: int
    shared_len: int = 0


def layer_linears(config: ModelConfig) -> tuple[Linear, ...]:
    """The matrix products of one layer."""
    width, inner, q_width = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    return (
        Linear("qkv", q_width + 2 * config.num_kv_heads * config.head_dim, width),
        Linear("o", width, q_width),
        Linear("gate_up", 2 * inner, width),
        Linear("down", width, inner),
    )


def lm_head(config: ModelConfig) -> Linear:
    """The product that gives the logits."""
    return Linear("lm_head", config.vocab_size, config.hidden_size)


def workload(config: ModelConfig, weights: WeightFormat, requests: Requests) -> list[Work]:
    """The parts of serving these requests once, from all prompts to all last tokens.

    Prompts are computed together, the first output token comes from the prompt, and every step decodes all requests.
    What requests share is read once.
    """
    count, shared = requests.concurrency, requests.shared_len
    new_len, num_steps = requests.prompt_len - shared, requests.output_len - 1
    num_weights = config.num_layers * sum(each.num_weights for each in layer_linears(config))
    weight_bytes, kv_bytes = num_weights * weights.bytes_per_weight, config.kv_bytes_per_token(2)
    seen_in_prefill = count * _sum_of_range(shared + 1, requests.prompt_len)
    own_lens = _sum_of_range(new_len + 1, new_len + num_steps)  # of one request, over the steps
    seen_in_decode = count * (own_lens + num_steps * shared)
    head, head_rows = lm_head(config), count * requests.output_len
    is_int8 = weights.is_int8
    return [
        Work("prefill linear", LINEAR, 2 * num_weights * count * new_len, weight_bytes, is_int8),
        Work(
            "prefill attention",
            ATTENTION,
            seen_in_prefill * _attention_flops(config),
            (shared + 2 * count * new_len) * kv_bytes,
        ),
        Work("decode linear", LINEAR, 2 * num_weights * count * num_steps, weight_bytes * num_steps, is_int8),
        Work(
            "decode attention",
            ATTENTION,
            seen_in_decode * _attention_flops(config),
            (count * own_lens + num_steps * shared) * kv_bytes,
        ),
        Work(
            "lm head",
            LINEAR,
            2 * head.num_weights * head_rows,
            head.num_weights * weights.bytes_per_weight * requests.output_len,
            is_int8,
        ),
    ]


def seconds_of(parts: list[Work], rates: Rates) -> float:
    """The floor of them all."""
    return sum(part.seconds(rates) for part in parts)


def output_tokens_per_s(config: ModelConfig, weights: WeightFormat, requests: Requests, rates: Rates) -> float:
    """No server can give more, whatever it overlaps within a part."""
    return requests.concurrency * requests.output_len / seconds_of(workload(config, weights, requests), rates)


def decode_step(
    config: ModelConfig, weights: WeightFormat, head: WeightFormat, batch: int, context_len: int
) -> Iterator[Work]:
    """The operators of one decode step, layer after layer, as the decoder calls them; activations are bf16.

    `weights` are those of the layers, `head` that of the logits.
    """
    width, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_width, kv_width = config.num_heads * head_dim, config.num_kv_heads * head_dim
    kv_bytes = batch * context_len * config.kv_bytes_per_token(2) / config.num_layers

    def linear(layer: Linear, stored: WeightFormat = weights, out_bytes: int = 2) -> Work:
        num_bytes = layer.num_weights * stored.bytes_per_weight
        num_bytes += batch * (2 * layer.in_features + out_bytes * layer.out_features)
        return Work(layer.name, LINEAR, 2 * layer.num_weights * batch, num_bytes, stored.is_int8)

    def elementwise(name: str, num_values: int) -> Work:
        return Work(name, OTHER, 0.0, 2 * batch * num_values)

    qkv, o, gate_up, down = layer_linears(config)
    attention_flops = batch * context_len * _attention_flops(config) / config.num_layers
    yield elementwise("embedding", 2 * width)
    for number in range(config.num_layers):
        yield elementwise("norm", (4 if number else 2) * width)
        yield linear(qkv)
        yield elementwise("rotary and store", 2 * (q_width + 2 * kv_width))
        yield Work("attention", ATTENTION, attention_flops, kv_bytes + 4 * batch * q_width)
        yield linear(o)
        yield elementwise("norm", 4 * width)
        yield linear(gate_up)
        yield elementwise("activation", 3 * inner)
        yield linear(down)
    yield elementwise("norm", 4 * width)
    yield linear(lm_head(config), head, out_bytes=4)
    yield Work("sampling", SAMPLING, 0.0, 4 * batch * config.vocab_size)


def _attention_flops(config: ModelConfig) -> int:
    """Of one query token and one key, over all layers: q.k and weight * v in every head."""
    return 4 * config.num_layers * config.num_heads * config.head_dim


def _sum_of_range(first: int, last: int) -> int:
    return (first + last) * (last - first + 1) // 2
