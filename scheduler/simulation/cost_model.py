"""What a step costs: a small model of the workers, read from JSON, that stands in for them in `millstream simulate`.

A step's work is a `StepShape` (step_shape.py). It runs as three parts, one after another, and each part takes the
larger of two times: its FLOPs over the FLOP rate that it reaches, and its bytes over the byte rate that it reaches.

    linear              bytes  weight_bytes_per_step
                        FLOPs  flops_per_token x tokens + flops_per_sample x sampled rows
    prefill attention   bytes  kv_bytes_per_token x KV tokens read, each once a row
                        FLOPs  flops_per_pair x (query, key) pairs
    decode attention    the same, of the decode rows, whose pairs are the KV tokens that they read

    step = linear x linear share + (prefill attention + decode attention) x attention share + collectives
           + step_seconds + prefill_row_seconds x prefill rows + decode_row_seconds x decode rows

A rate is the device's ceiling times the part's efficiency. With R tensor-parallel ranks the linear share is
serial + (1 - serial) / R, and the attention share that of the rank with the most KV heads; the collectives cost
`collectives_per_step` times their latency and their bytes over the link. The shares of one rank are 1, and it has no
collectives. The method is the roofline (Williams, Waterman, Patterson 2009), a part at a time.
"""

from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from .step_shape import StepShape

FOLDER = Path(__file__).parent / "cost_models"
TINIEST, LARGEST = 1e-12, 1e24

Positive = Annotated[float, msgspec.Meta(gt=TINIEST, le=LARGEST)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=LARGEST)]
Share = Annotated[float, msgspec.Meta(gt=TINIEST, le=1)]
SerialShare = Annotated[float, msgspec.Meta(ge=0, le=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**40)]


class CostModelError(ValueError):
    """The file is no cost model; the message names it and the field."""


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a cost model's JSON: every field is needed, and no other is taken."""


class Device(Costs, frozen=True):
    """The ceilings of one rank's device, and the memory that weights and KV pages may take."""

    bytes_per_second: Positive
    flops_per_second: Positive
    usable_memory_bytes: Positive


class ModelCosts(Costs, frozen=True):
    """What the model asks for; `flops_per_sample` is the LM head, which only sampled rows need."""

    weight_bytes: Positive
    weight_bytes_per_step: Positive
    flops_per_token: Positive
    flops_per_sample: NotNegative
    flops_per_pair: Positive
    kv_bytes_per_token: Positive
    num_kv_heads: Count
    vocab_size: Count
    context_len: Count


class Efficiency(Costs, frozen=True):
    """The share of the device's ceilings that a part reaches."""

    bytes: Share
    flops: Share


class Overheads(Costs, frozen=True):
    """What a step costs beside its parts: launches, sampling, preparation of rows."""

    step_seconds: Seconds
    prefill_row_seconds: Seconds
    decode_row_seconds: Seconds


class TensorParallel(Costs, frozen=True):
    """How the parts shrink with the ranks, and what the ranks' meetings cost."""

    linear_serial_share: SerialShare
    collectives_per_step: NotNegative
    collective_seconds: Seconds
    collective_bytes_per_token: NotNegative
    link_bytes_per_second: Positive


class Surroundings(Costs, frozen=True):
    """What happens outside the steps.

    request_seconds         from the client's request to the scheduler: HTTP and tokenizing
    output_seconds          from the scheduler to the client: detokenizing and HTTP
    message_seconds         one way between the scheduler and a worker
    gap_seconds             what a worker needs between two steps of which the second is there already
    iteration_seconds       one turn of the scheduler's loop, and
    iteration_row_seconds   each row of the results that it takes in it
    """

    request_seconds: Seconds
    output_seconds: Seconds
    message_seconds: Seconds
    gap_seconds: Seconds
    iteration_seconds: Seconds
    iteration_row_seconds: Seconds


class CostModel(Costs, frozen=True):
    """A device with a model on it. `description` says where the numbers come from."""

    description: str
    device: Device
    model: ModelCosts
    linear: Efficiency
    prefill_attention: Efficiency
    decode_attention: Efficiency
    overheads: Overheads
    tensor_parallel: TensorParallel
    surroundings: Surroundings

    def attention_share(self, tp_size: int) -> float:
        """The share of the KV heads that the rank with the most of them has."""
        heads = self.model.num_kv_heads
        return -(-heads // tp_size) / heads

    def num_kv_tokens(self, tp_size: int) -> int:
        """KV slots that fit beside the weights; 0 where not even the weights fit."""
        free_bytes = self.device.usable_memory_bytes - self.model.weight_bytes / tp_size
        return max(0, int(free_bytes / (self.model.kv_bytes_per_token * self.attention_share(tp_size))))


class PartSeconds(NamedTuple):
    """Where the time of a step goes."""

    linear: float
    prefill_attention: float
    decode_attention: float
    collectives: float
    overhead: float


class StepCosts:
    """The formula at the head of this file for a number of ranks."""

    def __init__(self, costs: CostModel, tp_size: int = 1) -> None:
        device, model, parallel = costs.device, costs.model, costs.tensor_parallel
        serial = parallel.linear_serial_share
        linear_share, attention_share = serial + (1 - serial) / tp_size, costs.attention_share(tp_size)
        linear_flops = costs.linear.flops * device.flops_per_second / linear_share
        self._weights = model.weight_bytes_per_step / (costs.linear.bytes * device.bytes_per_second) * linear_share
        self._token, self._sample = model.flops_per_token / linear_flops, model.flops_per_sample / linear_flops
        self._pair, self._kv_token, self._decode_kv_token = (
            model.flops_per_pair / (costs.prefill_attention.flops * device.flops_per_second) * attention_share,
            model.kv_bytes_per_token / (costs.prefill_attention.bytes * device.bytes_per_second) * attention_share,
            attention_share
            * max(
                model.flops_per_pair / (costs.decode_attention.flops * device.flops_per_second),
                model.kv_bytes_per_token / (costs.decode_attention.bytes * device.bytes_per_second),
            ),
        )
        num_collectives = parallel.collectives_per_step if tp_size > 1 else 0.0
        self._collectives = num_collectives * parallel.collective_seconds
        self._collective_token = num_collectives * parallel.collective_bytes_per_token / parallel.link_bytes_per_second
        self._overheads = costs.overheads

    def parts(self, shape: StepShape) -> PartSeconds:
        """The seconds of each part of a step."""
        num_tokens = shape.num_prefill_tokens + shape.num_decode_rows
        overheads = self._overheads
        return PartSeconds(
            max(self._weights, num_tokens * self._token + shape.num_samples * self._sample),
            max(shape.num_prefill_pairs * self._pair, shape.num_prefill_kv_tokens * self._kv_token),
            shape.num_decode_kv_tokens * self._decode_kv_token,
            self._collectives + num_tokens * self._collective_token,
            overheads.step_seconds
            + shape.num_prefill_rows * overheads.prefill_row_seconds
            + shape.num_decode_rows * overheads.decode_row_seconds,
        )

    def seconds(self, shape: StepShape) -> float:
        """How long a step takes."""
        return sum(self.parts(shape))


def packaged_names() -> list[str]:
    """The cost models that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load_cost_model(name_or_file: str) -> CostModel:
    """A packaged cost model by its name, or a file; CostModelError naming file and field where it is not one."""
    path = FOLDER / f"{name_or_file}.json" if name_or_file in packaged_names() else Path(name_or_file)
    try:
        return decode_cost_model(path.read_bytes())
    except OSError as error:
        known = ", ".join(packaged_names())
        raise CostModelError(f"{name_or_file}: {error.strerror or error} (packaged models: {known})") from error
    except msgspec.MsgspecError as error:
        raise CostModelError(f"{path}: {error}") from error


def decode_cost_model(text: bytes) -> CostModel:
    """Strictly: msgspec.MsgspecError names the field that is missing, unknown, of another type or out of range."""
    return msgspec.json.decode(text, type=CostModel)


def encode_cost_model(costs: CostModel) -> bytes:
    """As indented JSON."""
    return msgspec.json.format(msgspec.json.encode(costs), indent=2) + b"\n"
