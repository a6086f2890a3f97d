"""Steps that run before the first request, so that it does not pay for what happens only once."""

from collections.abc import Iterator

from ..common.batch_messages import NewReq, PageColumns, ScheduleBatch
from ..common.messages import pack_int32
from ..common.sampling_params import SamplingParams
from .rows import Limits

MAX_PREFILL_LEN = 256
NUM_DECODE_STEPS = 2


def warm_up_batches(limits: Limits, chunk_len: int) -> Iterator[ScheduleBatch]:
    """A prefill, decode steps, and the end of the one row; its pages are given back with it."""
    longest = min(limits.context_len, limits.num_pages * limits.page_size) - NUM_DECODE_STEPS
    prompt_len = max(1, min(longest, chunk_len if chunk_len > 0 else MAX_PREFILL_LEN, MAX_PREFILL_LEN))
    yield _prefill(limits, prompt_len)
    for step in range(1, 1 + min(NUM_DECODE_STEPS, longest + NUM_DECODE_STEPS - prompt_len)):
        yield _batch(step, decode_rows=pack_int32([0]))
    yield _batch(NUM_DECODE_STEPS + 1, freed_rows=pack_int32([0]))


def _prefill(limits: Limits, prompt_len: int) -> ScheduleBatch:
    num_pages = min(limits.num_pages, -(-(prompt_len + NUM_DECODE_STEPS) // limits.page_size))
    req = NewReq(
        row=0,
        generation=0,
        rid="warm-up",
        input_ids=pack_int32([0] * prompt_len),
        prompt_len=prompt_len,
        sampling_params=SamplingParams(seed=0),
        end_token_ids=(),
    )
    pages = PageColumns(pack_int32([0]), pack_int32([num_pages]), pack_int32(range(num_pages)))
    columns = (pack_int32([0]), pack_int32([0]), pack_int32([prompt_len]))
    return _batch(0, new_reqs=[req], new_pages=[pages], extend=columns)


def _batch(
    step: int,
    *,
    freed_rows: bytes = b"",
    new_reqs: list[NewReq] | None = None,
    new_pages: list[PageColumns] | None = None,
    extend: tuple[bytes, bytes, bytes] = (b"", b"", b""),
    decode_rows: bytes = b"",
) -> ScheduleBatch:
    return ScheduleBatch(step, freed_rows, new_reqs or [], new_pages or [], *extend, decode_rows)
