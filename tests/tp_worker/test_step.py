"""The tensors of a step, from rows and a batch."""

import numpy as np
import pytest
import torch

from millstream.common.batch_messages import NewReq, PageColumns, ScheduleBatch
from millstream.common.messages import pack_int32, unpack_int32
from millstream.common.sampling_params import SamplingParams
from millstream.tp_worker.forward_batch import ForwardBatch
from millstream.tp_worker.rows import Limits, Rows
from millstream.tp_worker.step import build_forward_batch, read_step

LIMITS = Limits(max_rows=8, context_len=64, vocab_size=1000, num_pages=32, page_size=4)


@pytest.fixture
def rows() -> Rows:
    """Row 5 has computed its prompt of 6 and sampled token 77; rows 2 and 3 are new, with 9 and 3 tokens."""
    rows = Rows(LIMITS)
    rows.apply(batch(new_reqs=[request(5, range(500, 506)), request(2, range(200, 209)), request(3, [30, 31, 32])]))
    pages = PageColumns(pack_int32([5, 2, 3]), pack_int32([2, 3, 1]), pack_int32([9, 8, 20, 21, 22, 30]))
    rows.apply(batch(new_pages=[pages]))
    rows.kv_lens[5], rows.row_lens[5], rows.last_tokens[5] = 6, 7, 77
    return rows


def request(row: int, input_ids: object) -> NewReq:
    ids = list(input_ids)  # type: ignore[call-overload]
    return NewReq(row, 1, f"rid-{row}", pack_int32(ids), len(ids), SamplingParams(seed=0), ())


def batch(**changes: object) -> ScheduleBatch:
    fields: dict[str, object] = dict.fromkeys(
        ("freed_rows", "extend_rows", "extend_starts", "extend_ends", "decode_rows"), b""
    )
    return ScheduleBatch(**{"step": 0, "new_reqs": [], "new_pages": [], **fields, **changes})  # type: ignore[arg-type]


def mixed_step() -> ScheduleBatch:
    """Row 2 computes [4, 9) on top of a cached page and samples, row 3 a middle chunk, row 5 decodes."""
    return batch(
        extend_rows=pack_int32([2, 3]),
        extend_starts=pack_int32([4, 0]),
        extend_ends=pack_int32([9, 2]),
        decode_rows=pack_int32([5]),
    )


def test_extend_rows_come_first_and_then_decode_rows_with_their_last_tokens(rows: Rows) -> None:
    forward = build_forward_batch(rows, read_step(rows, mixed_step()), torch.device("cpu"))
    assert forward.token_ids_T.tolist() == [204, 205, 206, 207, 208, 30, 31, 77]
    assert forward.positions_T.tolist() == [4, 5, 6, 7, 8, 0, 1, 6]
    assert forward.row_of_T.tolist() == [0, 0, 0, 0, 0, 1, 1, 2]
    assert forward.query_starts.tolist() == [0, 5, 7, 8]
    assert forward.kv_lens_R.tolist() == [9, 2, 7]
    assert forward.logits_indices_S.tolist() == [4, 7]
    assert [forward.page_table_RP[i, :n].tolist() for i, n in enumerate((3, 1, 2))] == [[20, 21, 22], [30], [9, 8]]
    assert forward.page_table_RP.shape == (3, 3)
    assert (forward.num_tokens, forward.num_reqs, forward.max_query_len, forward.max_kv_len) == (8, 3, 5, 9)


def test_the_tensors_have_the_types_that_the_operators_read(rows: Rows) -> None:
    forward = build_forward_batch(rows, read_step(rows, mixed_step()), torch.device("cpu"))
    tensors = [getattr(forward, name) for name in ForwardBatch.__slots__ if not name.startswith(("num_", "max_"))]
    assert all(tensor.is_contiguous() for tensor in tensors if tensor is not None)
    wide = {"token_ids_T", "logits_indices_S"}
    for name in ("token_ids_T", "positions_T", "row_of_T", "page_table_RP", "query_starts", "kv_lens_R"):
        assert getattr(forward, name).dtype == (torch.int64 if name in wide else torch.int32), name


def test_rows_in_error_leave_no_trace_in_the_tensors(rows: Rows) -> None:
    rows.fail(2, "it failed")
    step = read_step(rows, mixed_step())
    forward = build_forward_batch(rows, step, torch.device("cpu"))
    assert step.errors == {2: "it failed"}
    assert forward.token_ids_T.tolist() == [30, 31, 77]
    assert forward.logits_indices_S.tolist() == [2]


def test_pages_are_appended_behind_those_that_a_row_has(rows: Rows) -> None:
    pages = PageColumns(pack_int32([3, 5]), pack_int32([2, 1]), pack_int32([1, 2, 3]))
    rows.apply(batch(new_pages=[pages]))
    assert rows.page_table[3, :3].tolist() == [30, 1, 2]
    assert rows.page_table[5, :3].tolist() == [9, 8, 3]
    assert rows.num_pages[[2, 3, 5]].tolist() == [3, 3, 3]


def test_freed_rows_are_given_out_again_in_the_same_batch(rows: Rows) -> None:
    rows.apply(batch(freed_rows=pack_int32([5]), new_reqs=[request(5, [1, 2])]))
    assert rows.row_lens[5] == 2
    assert rows.num_pages[5] == 0


def test_int32_columns_are_those_of_the_protocol() -> None:
    assert unpack_int32(np.array([1, -2, 3], np.int32).tobytes()) == [1, -2, 3]
