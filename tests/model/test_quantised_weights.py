"""Linear layers that stay quantised: every rank's layers against dense layers of the dequantised weights."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from millstream.common.gguf_file import GGUFFile
from millstream.common.model_config import load_model_config
from millstream.kernels import backend
from millstream.kernels.linear import DenseWeight
from millstream.kernels.linear_int4 import Int4Weight
from millstream.kernels.linear_int8 import Int8Weight
from millstream.kernels.linear_w8a8 import W8A8Weight
from millstream.tp_worker.linear_layer import MAX_QUANTISED_ROWS, LinearLayer
from millstream.tp_worker.weights import Weights, load_weights
from tests.model.gguf_writing import write_model
from tests.model.run_decoder import ignore_progress, load_decoder, run
from tests.model.tiny_models import prompt, save_model

Kind = gguf.GGMLQuantizationType
EXTRA = {"rope.dimension_count": 16, "rope.freq_base": 10_000.0}
NUM_ROWS = (1, 4, 5, 12, 13, 40)


@pytest.fixture(scope="module", autouse=True)
def _kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    backend.configure("auto", tmp_path_factory.mktemp("kernels"))
    yield
    backend.configure("auto")


def load(
    path: Path,
    quantization: str = "auto",
    rank: int = 0,
    tp_size: int = 1,
    *,
    keeps_dense: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Weights:
    config = load_model_config(path, "auto")
    options = {"quantization": quantization, "keeps_dense": keeps_dense}
    return load_weights(path, config, "auto", dtype, "cpu", rank, tp_size, ignore_progress, **options)


def linears(weights: Weights) -> dict[str, LinearLayer]:
    """Every linear layer by a name for messages."""
    layers = {
        f"{index}.{name}": getattr(layer, name)
        for index, layer in enumerate(weights.layers)
        for name in ("qkv", "o", "gate_up", "down")
    }
    return {**layers, "lm_head": weights.lm_head}


def check_same_products(found: Weights, dense: Weights, tolerance: float = 1e-4) -> None:
    """Every layer, for few rows and many, gives what dense layers of the same values give in float32."""
    torch.manual_seed(0)
    others = linears(dense)
    for name, layer in linears(found).items():
        for num_rows in NUM_ROWS:
            x_TK = torch.randn(num_rows, layer.in_features)
            expected = others[name](x_TK)
            torch.testing.assert_close(layer(x_TK), expected, atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
            assert torch.equal(layer(x_TK, torch.float32), layer(x_TK))


def kinds_of(weights: Weights, num_rows: int) -> dict[str, type]:
    """What serves steps of so many rows, by the name of the layer without its number."""
    return {name.split(".")[-1]: type(layer.weight_for(num_rows)) for name, layer in linears(weights).items()}


@pytest.mark.usefixtures("c_compiler")
@pytest.mark.parametrize("tp_size", [1, 2, 3])
@pytest.mark.parametrize(
    ("variant", "architecture", "kind", "expected"),
    [
        ("llama-wide", "llama", Kind.Q4_1, Int4Weight),
        ("llama-wide", "llama", Kind.Q4_0, Int4Weight),
        ("llama-wide", "llama", Kind.Q8_0, Int8Weight),
        ("qwen2-wide", "qwen2", Kind.Q4_1, Int4Weight),
        ("qwen2-wide", "qwen2", Kind.Q8_0, Int8Weight),
    ],
)
def test_stored_types_stay_packed_and_give_the_products_of_their_values(
    variant: str, architecture: str, kind: Kind, expected: type, tp_size: int, tmp_path: Path
) -> None:
    """Fused and (llama) interleaved rows, biases (qwen2), and over 2 and 3 ranks uneven shards."""
    path = write_model(tmp_path / "model.gguf", variant, architecture, kind, EXTRA)
    for rank in range(tp_size):
        dense = load(path, "none", rank, tp_size)
        both = load(path, "auto", rank, tp_size)
        alone = load(path, "auto", rank, tp_size, keeps_dense=False)
        assert set(kinds_of(dense, 1).values()) == {DenseWeight}
        assert set(kinds_of(both, 1).values()) == set(kinds_of(alone, 40).values()) == {expected}
        assert set(kinds_of(both, MAX_QUANTISED_ROWS[expected] + 1).values()) == {DenseWeight}
        check_same_products(both, dense)
        check_same_products(alone, dense)
        assert alone.num_bytes < dense.num_bytes < both.num_bytes


def test_a_model_gives_the_same_logits_with_any_copies(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", "llama-wide", "llama", Kind.Q4_1, EXTRA)
    found = [
        run(load_decoder(path, **options), prompt(), piece_len)
        for options in ({"quantization": "none"}, {"keeps_dense": False}, {})
        for piece_len in (5, 41)
    ]
    for logits in found:
        assert logits is not None
        torch.testing.assert_close(logits, found[0], atol=1e-3, rtol=0)


@pytest.mark.usefixtures("c_compiler")
def test_parts_of_other_types_make_their_fused_layer_dense(tmp_path: Path) -> None:
    kinds = {"attn_v": Kind.Q8_0, "ffn_up": Kind.Q4_0, "ffn_down": Kind.Q5_1, "attn_output": Kind.F16}
    path = write_model(tmp_path / "model.gguf", "llama-wide", "llama", Kind.Q4_1, EXTRA, kinds=kinds)
    weights = load(path)
    assert kinds_of(weights, 1) == {
        "qkv": DenseWeight,
        "o": DenseWeight,
        "gate_up": Int4Weight,
        "down": DenseWeight,
        "lm_head": Int4Weight,
    }
    check_same_products(weights, load(path, "none"))


@pytest.mark.usefixtures("c_compiler")
def test_a_cut_inside_a_group_makes_that_layer_dense(tmp_path: Path) -> None:
    """Four heads of 16 over three ranks: 32, 16 and 16 inputs of o_proj."""
    path = write_model(tmp_path / "model.gguf", "llama-narrow-heads", "llama", Kind.Q4_1, EXTRA)
    for rank, expected in enumerate([Int4Weight, DenseWeight, DenseWeight]):
        weights = load(path, rank=rank, tp_size=3)
        assert kinds_of(weights, 1)["o"] == expected
        assert kinds_of(weights, 1)["qkv"] == Int4Weight
        check_same_products(weights, load(path, "none", rank, 3))


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
@pytest.mark.parametrize("scale", [b"\x00\x7e", b"\x00\x7c"], ids=["NaN", "infinity"])
def test_damaged_scales_fail_rows_as_they_do_in_dense_layers(kind: Kind, scale: bytes, tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", "llama-wide", "llama", kind, EXTRA)
    offset = GGUFFile(path).tensors["blk.1.ffn_down.weight"].offset
    body = bytearray(path.read_bytes())
    body[offset : offset + 2] = scale
    path.unlink()
    path.write_bytes(body)
    for quantization in ("none", "auto", "int8", "w8a8"):
        logits = run(load_decoder(path, quantization=quantization), prompt(), 5)
        assert logits is not None
        assert not logits.isfinite().any(), quantization


@pytest.mark.usefixtures("c_compiler")
def test_a_scale_whose_offset_float16_cannot_hold_makes_the_layer_dense(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", "llama-wide", "llama", Kind.Q4_0, EXTRA)
    offset = GGUFFile(path).tensors["blk.1.ffn_down.weight"].offset
    body = bytearray(path.read_bytes())
    body[offset : offset + 2] = np.float16(9000).tobytes()
    path.unlink()
    path.write_bytes(body)
    weights, dense = load(path), load(path, "none")
    assert [type(layer.down.weight_for(1)) for layer in weights.layers] == [Int4Weight, DenseWeight, Int4Weight]
    x_TK = torch.ones(1, weights.layers[1].down.in_features)
    assert torch.equal(weights.layers[1].down(x_TK), dense.layers[1].down(x_TK))


@pytest.mark.usefixtures("c_compiler")
@pytest.mark.parametrize(
    ("quantization", "expected", "head"),
    [("int8", Int8Weight, Int8Weight), ("int4", Int4Weight, Int8Weight), ("w8a8", W8A8Weight, W8A8Weight)],
)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_safetensors_are_quantised_where_the_flag_asks(
    quantization: str, expected: type, head: type, tp_size: int, tmp_path: Path
) -> None:
    save_model("qwen2-wide", tmp_path)
    for rank in range(tp_size):
        plain = load(tmp_path, "auto", rank, tp_size)
        assert set(kinds_of(plain, 1).values()) == {DenseWeight}
        weights = load(tmp_path, quantization, rank, tp_size)
        found = kinds_of(weights, 1)
        assert found.pop("lm_head") == head
        assert set(found.values()) == {expected}
        for name, layer in linears(weights).items():
            x_TK = torch.randn(7, layer.in_features)
            expected_TN, found_TN = linears(plain)[name](x_TK), layer(x_TK)
            limit = 0.12 if expected is Int4Weight else 0.02
            assert (found_TN - expected_TN).norm() < limit * expected_TN.norm(), name
        assert torch.equal(weights.embed_tokens_VF, plain.embed_tokens_VF)


@pytest.mark.usefixtures("c_compiler")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_steps_of_few_and_many_rows_use_the_same_quantised_values(quantization: str, tmp_path: Path) -> None:
    save_model("qwen2-wide", tmp_path)
    for layer in linears(load(tmp_path, quantization)).values():
        x_TK = torch.randn(40, layer.in_features)
        torch.testing.assert_close(layer(x_TK)[:2], layer(x_TK[:2]), atol=1e-4, rtol=0)


@pytest.mark.usefixtures("c_compiler")
@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ("int8", {"qkv": Int4Weight, "o": Int8Weight, "down": Int8Weight, "lm_head": Int8Weight}),
        ("int4", {"qkv": Int4Weight, "o": Int4Weight, "down": Int4Weight, "lm_head": Int8Weight}),
    ],
)
def test_a_flag_keeps_what_a_file_has_in_fewer_bits(
    quantization: str, expected: dict[str, type], tmp_path: Path
) -> None:
    kinds = {"attn_output": Kind.F16, "ffn_down": Kind.Q8_0, "token_embd": Kind.Q8_0}
    path = write_model(tmp_path / "model.gguf", "llama-wide", "llama", Kind.Q4_1, EXTRA, kinds=kinds)
    found = kinds_of(load(path, quantization), 1)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.usefixtures("c_compiler")
@pytest.mark.parametrize("quantization", ["auto", "int4", "w8a8"])
def test_without_c_code_layers_are_dense_in_the_quantised_values(quantization: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", "llama-wide", "llama", Kind.Q4_1, EXTRA)
    quantised = load(path, quantization)
    backend.set_backend("torch")
    try:
        dense = load(path, quantization, keeps_dense=False)
        assert set(kinds_of(dense, 1).values()) == {DenseWeight}
        check_same_products(quantised, dense, tolerance=0.3 if quantization == "w8a8" else 1e-4)
    finally:
        backend.set_backend("auto")


@pytest.mark.usefixtures("c_compiler")
def test_bytes_are_those_of_the_tensors_that_are_held(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", "llama-wide", "llama", Kind.Q4_1, EXTRA)
    weights = load(path, dtype=torch.bfloat16)
    assert weights.num_bytes == sum(tensor_bytes(held_tensors(weights)))


def held_tensors(weights: Weights) -> Iterator[torch.Tensor | None]:
    """All of them, found without asking the layers."""
    yield from (weights.embed_tokens_VF, weights.norm_F)
    for layer in weights.layers:
        yield from (layer.attention_norm_F, layer.mlp_norm_F)
    for linear in linears(weights).values():
        few, many = linear.weight_for(1), linear.weight_for(10**6)
        assert isinstance(few, Int4Weight)
        assert isinstance(many, DenseWeight)
        yield from (few.words, few.scales, many.panels, many.plain_NK)


def tensor_bytes(tensors: Iterator[torch.Tensor | None]) -> Sequence[int]:
    """Bytes of those that are there."""
    return [x.numel() * x.element_size() for x in tensors if x is not None]
