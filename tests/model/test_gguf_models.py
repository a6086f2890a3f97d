"""Models in GGUF files: every architecture and every way to store values."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from millstream.common.gguf_file import TYPES, GGUFFile
from millstream.common.model_config import load_model_config
from millstream.common.model_error import ModelError
from millstream.common.tensor_parallel import Range, TensorShard
from millstream.tp_worker.gguf_weights import GGUFSource
from tests.model.gguf_writing import F32, write_gguf, write_model
from tests.model.run_decoder import load_decoder, run
from tests.model.tiny_models import LLAMA3, YARN, expected_logits, prompt

Kind = gguf.GGMLQuantizationType
QUANTISED = [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1]
K_QUANTS = [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K]
PLAIN = [Kind.F32, Kind.F16, Kind.BF16]
GEMMA = {"attention.sliding_window": 7, "attention.sliding_window_pattern": 3, "rope.freq_base": 1e6}
YARN_KEYS = {
    "rope.freq_base": YARN["rope_theta"],
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": YARN["factor"],
    "rope.scaling.original_context_length": YARN["original_max_position_embeddings"],
}


@pytest.mark.parametrize(
    ("variant", "architecture", "extra"),
    [
        ("llama", "llama", {}),
        ("llama-tied", "llama", {"rope.dimension_count": 16}),
        ("llama-biases", "llama", {}),
        ("llama-linear", "llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 2.5}),
        ("llama-yarn", "llama", YARN_KEYS),
        ("mistral-sliding", "llama", {"attention.sliding_window": 7}),
        ("qwen2", "qwen2", {}),
        ("qwen3", "qwen3", {}),
        ("gemma3-gguf", "gemma3", GEMMA),
    ],
)
def test_a_gguf_file_gives_the_logits_of_its_model(
    variant: str, architecture: str, extra: dict[str, Any], tmp_path: Path
) -> None:
    path = write_model(tmp_path / "model.gguf", variant, architecture, extra=extra)
    logits = run(load_decoder(path), prompt(), 17)
    assert logits is not None
    torch.testing.assert_close(logits, expected_logits(variant), atol=1e-4, rtol=0)


def test_llama_3_scaling_comes_from_the_tensor_rope_freqs(tmp_path: Path) -> None:
    factors = llama3_factors(head_dim=16)
    tensors = {"rope_freqs.weight": (factors, F32)}
    extra = {"rope.freq_base": LLAMA3["rope_theta"]}
    path = write_model(tmp_path / "model.gguf", "llama-llama3", "llama", extra=extra, extra_tensors=tensors)
    logits = run(load_decoder(path), prompt())
    assert logits is not None
    torch.testing.assert_close(logits, expected_logits("llama-llama3"), atol=1e-4, rtol=0)


def llama3_factors(head_dim: int) -> np.ndarray:
    """What llama.cpp's converter writes: the unscaled frequencies over transformers' scaled ones."""
    config = transformers.LlamaConfig(head_dim=head_dim, rope_parameters=dict(LLAMA3))
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / (float(LLAMA3["rope_theta"]) ** (torch.arange(0, head_dim, 2).float() / head_dim))
    return (plain / scaled).numpy()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("variant", "architecture"), [("llama-wide", "llama"), ("qwen2-wide", "qwen2")])
def test_a_quantised_file_gives_the_logits_of_transformers_own_loader(
    variant: str, architecture: str, tmp_path: Path
) -> None:
    extra = {"rope.dimension_count": 16, "rope.freq_base": 10_000.0}
    path = write_model(tmp_path / "model.gguf", variant, architecture, Kind.Q8_0, extra)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad():
        expected = oracle(torch.tensor([prompt()])).logits[0]
    logits = run(load_decoder(path), prompt())
    assert logits is not None
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", [*PLAIN, *QUANTISED, *K_QUANTS], ids=lambda kind: kind.name)
@pytest.mark.parametrize("columns", [Range(0, 512), Range(32, 512), Range(7, 300)], ids=str)
def test_rows_and_columns_of_every_type_are_read_as_the_gguf_package_does(
    kind: Kind, columns: Range, tmp_path: Path
) -> None:
    raw = encode(kind, np.random.default_rng(5).standard_normal((70, 512), dtype=np.float32))
    file = GGUFFile(write_tensor(tmp_path / "model.gguf", raw, kind))
    source = GGUFSource(file, load_model_config(file.path, "auto"))
    rows = Range(3, 69)
    out = torch.empty(rows.size, columns.size)
    source.read_into(out, "extra.weight", TensorShard((70, 512), rows, columns))
    with np.errstate(all="ignore"):
        whole = gguf.quants.dequantize(raw, kind)
    expected = torch.from_numpy(whole[rows.start : rows.end, columns.start : columns.end].copy())
    assert torch.equal(out.nan_to_num(), expected.nan_to_num())
    assert out.float().std() > 0


def test_the_table_of_types_is_that_of_the_gguf_package() -> None:
    sizes = {kind.type_id: (kind.name, kind.block_size, kind.block_bytes) for kind in TYPES.values()}
    assert sizes == {int(kind): (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in [*PLAIN, *QUANTISED, *K_QUANTS]}


def encode(kind: Kind, values: np.ndarray) -> np.ndarray:
    """Bytes of the values; for K-quants, which the package cannot write, random blocks with small scales."""
    if kind not in K_QUANTS:
        return gguf.quants.quantize(values, kind)
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    raw = np.random.default_rng(6).integers(0, 256, (70, 2, block_bytes), dtype=np.uint8)
    raw[..., -2:] = [0, 0x2C]  # float16 0.0625, wherever the type keeps its scales
    raw[..., :4] = [0, 0x2C, 0, 0x2C]
    if kind == Kind.Q2_K:
        raw[..., 80:84] = [0, 0x2C, 0, 0x2C]
    return raw.reshape(70, -1)


def write_tensor(path: Path, raw: np.ndarray, kind: Kind) -> Path:
    """A one-layer llama's metadata and one tensor, as bytes."""
    metadata = {
        "context_length": 64,
        "block_count": 1,
        "embedding_length": 32,
        "feed_forward_length": 64,
        "attention.head_count": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    table = np.zeros((8, 32), dtype=np.float32)
    stored = raw.view(np.uint8) if kind not in (Kind.F32, Kind.F16) else raw
    return write_gguf(path, "llama", metadata, {"token_embd.weight": (table, F32), "extra.weight": (stored, kind)})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"expert_count": 8}, "llama.expert_count: mixtures of experts are not supported"),
        ({"rope.dimension_count": 8}, "rope.dimension_count differs from the head dimension 16"),
        ({"rope.scaling.type": "longrope"}, "'longrope' is not known; known are none, linear, yarn"),
        ({"attention.head_count": [6, 6, 3]}, "attention.head_count differs between layers"),
        ({"attention.head_count_kv": 4}, "6 heads cannot share 4 KV heads evenly"),
        ({"block_count": 0}, "llama.block_count must be a whole number from 1 to 1024, not 0"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "must be a number above 0"),
        ({".tokenizer.ggml.eos_token_id": 97}, "special token 97 is not in the vocabulary of 97"),
        ({"block_count": 4}, "tensor model.layers.3.self_attn.q_proj.weight is missing"),
        ({"block_count": 2}, "unexpected tensor model.layers.2.input_layernorm.weight"),
        ({"feed_forward_length": 96}, r"mlp.gate_proj.weight has shape \(80, 48\), expected \(96, 48\)"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", "llama", "llama", extra=changed)
    with pytest.raises(ModelError, match=message):
        load_decoder(path)


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", "llama", "falcon")
    with pytest.raises(ModelError, match="'falcon' is not known; known in GGUF files are llama, qwen2, qwen3, gemma3"):
        load_model_config(path, "auto")


def test_every_end_of_turn_token_ends(tmp_path: Path) -> None:
    extra = {".tokenizer.ggml.eot_token_id": 5, ".tokenizer.ggml.eom_token_id": 2}
    path = write_model(tmp_path / "model.gguf", "llama", "llama", extra=extra)
    assert load_model_config(path, "auto").eos_token_ids == (2, 5)


def test_a_directory_with_one_gguf_file_and_no_safetensors_is_that_file(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", "llama", "llama")
    (tmp_path / "config.json").write_text("{}")
    assert load_model_config(tmp_path, "auto").weight_format == "gguf"
    logits = run(load_decoder(tmp_path), prompt())
    assert logits is not None
    torch.testing.assert_close(logits, expected_logits("llama"), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("num_layers", "expected"), [(48, 16**-0.5), (62, 8**-0.5)])
def test_the_attention_scale_of_gemma_27b_is_that_of_llama_cpp(
    num_layers: int, expected: float, tmp_path: Path
) -> None:
    path = write_model(tmp_path / "model.gguf", "gemma3-gguf", "gemma3", extra={"block_count": num_layers, **GEMMA})
    assert load_model_config(path, "auto").attention_scale == pytest.approx(expected)
