"""The rates that this machine reaches now, for the floors: bytes read in a second, bf16 FLOPs, int8 operations.

A rate is what one in ten of many short attempts exceeds, by whatever is fastest here: reads of memory far larger than the
caches, and the products of one layer of the model, by oneDNN and by our own code. Other work on the machine lowers it, as
it lowers what the servers reach.

    python -m tests.bench.machine [--model smollm2]     (one JSON line)
"""

import argparse
import dataclasses
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable

import torch

from millstream.common.config import cache_dir
from millstream.common.model_config import load_model_config
from millstream.common.model_path import find_model
from millstream.common.model_struct import ModelConfig
from millstream.kernels import backend
from millstream.kernels.linear import linear_dense, pack_dense
from millstream.kernels.linear_w8a8 import linear_w8a8, pack_w8a8
from tests.bench.floor import Linear, Rates, layer_linears

NUM_PIECES, PIECE_BYTES = 4, 2**27
NUM_ROWS = (128, 256, 512)
SECONDS_EACH = 0.1
Product = Callable[[torch.Tensor], object]


def measure_rates(config: ModelConfig) -> Rates:
    """All three, with torch's threads; about five seconds. `backend.configure` comes before it."""
    with torch.inference_mode():
        return Rates(memory=memory_rate(), bf16=_matrix_rate(config, bf16_ways), int8=_matrix_rate(config, int8_ways))


def memory_rate() -> float:
    """Bytes a second of the fastest of three ways to read, in pieces that have left the caches when they are read again."""
    pieces = itertools.cycle(torch.ones(NUM_PIECES, PIECE_BYTES // 4 // 4096, 4096))
    ones = torch.ones(4096)
    ways: list[Callable[[], object]] = [
        lambda: next(pieces).sum(),
        lambda: next(pieces).amax(),
        lambda: next(pieces) @ ones,
    ]
    return PIECE_BYTES / min(short_seconds(way) for way in ways)


def bf16_ways(linears: Iterable[Linear]) -> list[list[Product]]:
    """One list of products for each way to compute them."""
    weights = [torch.randn(each.out_features, each.in_features).bfloat16() for each in linears]
    ours = [pack_dense(weight) for weight in weights]
    ways: list[list[Product]] = [[lambda x, w=w: linear_dense(x, w, torch.bfloat16) for w in ours]]
    if torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        packed = [torch.ops.mkldnn._reorder_linear_weight(weight, None) for weight in weights]
        ways.append([lambda x, w=w: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "") for w in packed])
    return ways


def int8_ways(linears: Iterable[Linear]) -> list[list[Product]]:
    """As above; ours quantises the activations within its time, oneDNN gets them quantised."""
    sizes = [(each.out_features, each.in_features) for each in linears]
    weights = [torch.randint(-127, 128, size, dtype=torch.int8) for size in sizes]
    ours = [pack_w8a8(weight, torch.ones(weight.shape[0])) for weight in weights]
    ways: list[list[Product]] = [[lambda x, w=w: linear_w8a8(x, w, torch.bfloat16) for w in ours]]
    if torch._C._has_mkldnn:
        ways.append([onednn_int8(weight) for weight in weights])
    return ways


def onednn_int8(weight_NK: torch.Tensor) -> Product:
    """oneDNN's product with one scale for the tensor of activations."""
    out_features, in_features = weight_NK.shape
    packed = torch.ops.onednn.qlinear_prepack(weight_NK, None)
    scale_N, zero_N = torch.ones(out_features), torch.zeros(out_features, dtype=torch.int32)
    quantised = torch.randint(0, 256, (max(NUM_ROWS), in_features), dtype=torch.uint8)
    out = (None, 1.0, 0, torch.bfloat16, "none", [], "")
    return lambda x: torch.ops.onednn.qlinear_pointwise(
        quantised[: x.shape[0]], 1.0, 128, packed, scale_N, zero_N, *out
    )


def short_seconds(call: Callable[[], object], seconds: float = SECONDS_EACH) -> float:
    """What one in ten of the calls beats that fit into so many seconds; after one that is not counted."""
    call()
    times: list[float] = []
    while len(times) < 2 or sum(times) < seconds:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 10]


def describe_load() -> dict[str, object]:
    """How busy the machine is, for the reader of the figures."""
    load = [round(each, 2) for each in os.getloadavg()]
    return {"load_average": load, "cpus": len(os.sched_getaffinity(0)), "torch": torch.__version__}


def _matrix_rate(config: ModelConfig, make_ways: Callable[[Iterable[Linear]], list[list[Product]]]) -> float:
    """Of the four products of a layer, one after another."""
    linears = layer_linears(config)
    ways = make_ways(linears)
    seconds_a_row = []
    for num_rows in NUM_ROWS:
        inputs = [torch.randn(num_rows, each.in_features).bfloat16() for each in linears]
        for way in ways:
            seconds = sum(
                short_seconds(lambda product=product, x=x: product(x)) for product, x in zip(way, inputs, strict=True)
            )
            seconds_a_row.append(seconds / num_rows)
    return 2 * sum(each.num_weights for each in linears) / min(seconds_a_row)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="whose layers are multiplied (default: %(default)s)")
    load = describe_load()
    config = load_model_config(find_model(parser.parse_args().model), "auto")
    backend.configure("auto", cache_dir())
    print(json.dumps({"rates": dataclasses.asdict(measure_rates(config)), **load}))


if __name__ == "__main__":
    main()
