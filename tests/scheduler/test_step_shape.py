"""What is read of a step from the batch stream."""

import numpy as np

from millstream.common.batch_messages import NewReq, PageColumns, ScheduleBatch
from millstream.common.messages import pack_int32
from millstream.common.sampling_params import SamplingParams
from millstream.scheduler.simulation.step_shape import RowLengths, StepShape


def batch(
    *,
    new: dict[int, int] | None = None,
    extends: tuple[tuple[int, int, int], ...] = (),
    decodes: tuple[int, ...] = (),
) -> ScheduleBatch:
    """`new` are rows with their known tokens, `extends` (row, start, end)."""
    reqs = [
        NewReq(row, 1, "r", pack_int32(range(size)), size, SamplingParams(), ()) for row, size in (new or {}).items()
    ]
    columns = [pack_int32([extend[index] for extend in extends]) for index in range(3)]
    return ScheduleBatch(0, b"", reqs, [PageColumns(b"", b"", b"")], *columns, pack_int32(decodes))


def test_a_whole_prompt_samples_and_attends_to_itself() -> None:
    plan = RowLengths(4).begin(batch(new={2: 5}, extends=((2, 0, 5),)))
    assert plan.shape == StepShape(1, 5, 1 + 2 + 3 + 4 + 5, 5, 0, 0, 1)
    assert plan.samples_N.tolist() == [True]
    assert plan.shape.kind == "prefill"


def test_a_middle_chunk_does_not_sample_and_a_later_one_attends_to_the_earlier() -> None:
    rows = RowLengths(4)
    assert rows.begin(batch(new={0: 8}, extends=((0, 0, 4),))).shape.num_samples == 0
    shape = rows.begin(batch(extends=((0, 4, 8),))).shape
    assert (shape.num_prefill_pairs, shape.num_prefill_kv_tokens, shape.num_samples) == (5 + 6 + 7 + 8, 8, 1)


def test_decode_rows_read_what_they_know_and_follow_their_results() -> None:
    rows = RowLengths(4)
    rows.begin(batch(new={0: 8, 3: 2}, extends=((0, 0, 8), (3, 0, 2))))
    rows.end(np.array([0, 3], np.int32), np.array([9, 3], np.int32))
    plan = rows.begin(batch(new={1: 4}, extends=((1, 0, 4),), decodes=(3, 0)))
    assert plan.rows_N.tolist() == [1, 3, 0]
    assert plan.shape == StepShape(1, 4, 10, 4, 2, 12, 3)
    assert plan.shape.kind == "mixed"
    assert rows.begin(batch(decodes=(3, 0))).shape == StepShape(0, 0, 0, 0, 2, 12, 2)
