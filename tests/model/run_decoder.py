"""Runs our decoder on token ids in the pieces that a test asks for, with pages in a scrambled order."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch

from millstream.common.model_config import ModelConfig, load_model_config
from millstream.tp_worker.communicator import Communicator, SingleCommunicator
from millstream.tp_worker.decoder import Decoder
from millstream.tp_worker.forward_batch import ForwardBatch
from millstream.tp_worker.weights import load_weights

PAGE_SIZE = 4
NUM_PAGES = 64


def load_decoder(
    path: Path,
    load_format: str = "auto",
    dtype: torch.dtype = torch.float32,
    rank: int = 0,
    tp_size: int = 1,
    communicator: Communicator | None = None,
    *,
    quantization: str = "auto",
    keeps_dense: bool = True,
) -> Decoder:
    """The decoder of the model at `path` with its KV caches."""
    config = load_model_config(path, load_format)
    copies = {"quantization": quantization, "keeps_dense": keeps_dense}
    weights = load_weights(path, config, load_format, dtype, "cpu", rank, tp_size, ignore_progress, **copies)
    decoder = Decoder(config, weights, communicator or SingleCommunicator())
    decoder.alloc_kv_caches(NUM_PAGES, PAGE_SIZE)
    return decoder


def ignore_progress(loaded_bytes: int, total_bytes: int) -> None:
    """Nobody looks."""


def run(decoder: Decoder, ids: Sequence[int], piece_len: int | None = None) -> torch.Tensor | None:
    """Logits of every position, [T, V] on rank 0: the ids are fed `piece_len` at a time, as one request."""
    starts = [*range(0, len(ids), piece_len or len(ids)), len(ids)]
    pieces = [forward(decoder, make_batch([(ids, start, end)])) for start, end in pairwise(starts)]
    found = [piece for piece in pieces if piece is not None]
    return torch.cat(found) if found else None


def forward(decoder: Decoder, batch: ForwardBatch) -> torch.Tensor | None:
    """Logits that outlive the next step."""
    logits_SV = decoder.forward(batch).logits_SV
    return None if logits_SV is None else logits_SV.clone()


def make_batch(requests: Sequence[tuple[Sequence[int], int, int]], only_last: bool = False) -> ForwardBatch:
    """Requests (ids, start, end) compute the positions from start to end; request r owns every R-th page, backwards."""
    num_reqs = len(requests)
    lens = [end - start for _, start, end in requests]
    starts = torch.tensor([0, *lens]).cumsum(0)
    page_rows = [list(range(NUM_PAGES - 1 - r, -1, -num_reqs))[: NUM_PAGES // num_reqs] for r in range(num_reqs)]
    return ForwardBatch(
        token_ids_T=torch.tensor([token_id for ids, start, end in requests for token_id in ids[start:end]]),
        positions_T=int32([position for _, start, end in requests for position in range(start, end)]),
        row_of_T=int32([row for row, length in enumerate(lens) for _ in range(length)]),
        page_table_RP=int32(page_rows),
        query_starts=starts.int(),
        kv_lens_R=int32([end for _, _, end in requests]),
        logits_indices_S=starts[1:] - 1 if only_last else torch.arange(sum(lens)),
        num_tokens=sum(lens),
        num_reqs=num_reqs,
        max_query_len=max(lens),
        max_kv_len=max(end for _, _, end in requests),
    )


def int32(values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
    """A tensor of the batch's index type."""
    return torch.tensor(values, dtype=torch.int32)


def config_of(path: Path) -> ModelConfig:
    """Short for the tests."""
    return load_model_config(path, "auto")
