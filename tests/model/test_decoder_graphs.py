"""Steps that are recorded and run again give what operator by operator gives."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from millstream.kernels.graph import Arena, record
from millstream.tp_worker import decoder_graphs
from millstream.tp_worker.forward_batch import ForwardBatch
from tests.model.run_decoder import PAGE_SIZE, forward, load_decoder, make_batch, run
from tests.model.tiny_models import VARIANTS, expected_logits, prompt, save_model

TOLERANCE = 1e-4
VIEWS = {
    "view",
    "split_with_sizes",
    "slice",
    "select",
    "detach",
    "_unsafe_view",
    "alias",
    "as_strided",
    "t",
    "lift_fresh",
}


class OnlyViews(TorchDispatchMode):
    """Fails on torch's own arithmetic, which a recording would lose."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        assert name in VIEWS, f"torch computes {name} while a graph is recorded"
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=list(VARIANTS))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model of each family."""
    return save_model(request.param, tmp_path)


@pytest.mark.usefixtures("c_compiler")
def test_a_step_is_operators_alone(folder: Path) -> None:
    decoder = load_decoder(folder)
    ids = prompt()
    for batch in (make_batch([(ids, 0, 7), (ids, 0, 1)], only_last=True), make_batch([(ids, 3, 4), (ids, 5, 6)])):
        with torch.inference_mode(), record(Arena(2**24)) as graph, OnlyViews():
            decoder._compute(batch)
        assert len(graph.nodes()) > 8 * decoder.config.num_layers


@pytest.mark.usefixtures("c_compiler")
@pytest.mark.parametrize("variant", ["llama", "gemma3"])
def test_decode_steps_of_changing_rows_are_those_of_one_prefill(variant: str, tmp_path: Path) -> None:
    """The same graphs serve other tokens, lengths and wider page tables, with two and three requests in turn."""
    decoder, ids, start = load_decoder(save_model(variant, tmp_path)), prompt(), 3
    expected_TV = expected_logits(variant)
    forward(decoder, make_batch([(ids, 0, start)] * 3))
    for position in range(start, len(ids)):
        step = make_batch([(ids, position, position + 1)] * 3)
        for num_reqs in (2, 3):
            logits_SV = forward(decoder, first_requests(step, num_reqs))
            assert logits_SV is not None
            expected_SV = expected_TV[position].expand(num_reqs, -1)
            torch.testing.assert_close(logits_SV, expected_SV, atol=TOLERANCE, rtol=0)
    assert set(decoder._graphs._recorded) == {(3 * start, 3, 3 * start), (2, 2, 2), (3, 3, 3)}


@pytest.mark.usefixtures("c_compiler")
def test_the_graphs_that_were_used_last_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_graphs, "MAX_GRAPHS", 2)
    decoder, ids = load_decoder(save_model("llama", tmp_path)), prompt()
    for num_tokens in (3, 4, 3, 5):
        logits = forward(decoder, make_batch([(ids, 0, num_tokens)]))
        assert logits is not None
        torch.testing.assert_close(logits, expected_logits("llama")[:num_tokens], atol=TOLERANCE, rtol=0)
    assert [shape[0] for shape in decoder._graphs._recorded] == [3, 5]


def first_requests(step: ForwardBatch, num_reqs: int) -> ForwardBatch:
    """A decode step of fewer requests, with a page table that is no wider than it needs."""
    num_pages = -(-step.max_kv_len // PAGE_SIZE)
    return dataclasses.replace(
        step,
        token_ids_T=step.token_ids_T[:num_reqs],
        positions_T=step.positions_T[:num_reqs],
        row_of_T=step.row_of_T[:num_reqs],
        page_table_RP=step.page_table_RP[:num_reqs, :num_pages].contiguous(),
        query_starts=step.query_starts[: num_reqs + 1],
        kv_lens_R=step.kv_lens_R[:num_reqs],
        logits_indices_S=step.logits_indices_S[:num_reqs],
        num_tokens=num_reqs,
        num_reqs=num_reqs,
    )


def test_what_cannot_be_recorded_runs_operator_by_operator(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    decoder = load_decoder(save_model("llama", tmp_path), dtype=torch.float16)
    assert run(decoder, prompt(), 13) is not None
    told = [record.message for record in caplog.records if "operator by operator" in record.message]
    assert len(told) == 1


@pytest.mark.usefixtures("c_compiler")
def test_a_step_larger_than_the_arena_gets_a_larger_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_graphs, "FIRST_ARENA_BYTES", 4096)
    logits = run(load_decoder(save_model("llama", tmp_path)), prompt())
    assert logits is not None
    torch.testing.assert_close(logits, expected_logits("llama"), atol=TOLERANCE, rtol=0)
