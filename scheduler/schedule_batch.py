"""A step as the scheduler keeps it while it is in flight, and as it goes to the workers."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..common.messages import ROW_ERROR, BatchResult, NewReq, PageColumns, ScheduleBatch, pack_int32, unpack_int32
from .req import Req


class ProtocolError(RuntimeError):
    """A worker's result does not answer the step that was sent: the server must end."""


class PlannedRow(NamedTuple):
    """A row of a step: it computes the KV of `req` up to `end`, and samples a token unless it is a middle chunk."""

    req: Req
    row: int
    row_generation: int
    end: int
    samples: bool


class RowResult(NamedTuple):
    """What came back for a planned row; `error` is None unless the row failed."""

    planned: PlannedRow
    token_ids: list[int]
    row_len: int
    error: str | None


class StepInFlight(NamedTuple):
    """A step whose result is not back; rows in the order of the result."""

    step: int
    rows: list[PlannedRow]
    packed_rows: bytes
    packed_generations: bytes


def plan_step(step: int, extends: list[Req], decodes: list[Req]) -> StepInFlight:
    """Note what a step computes: `extend_range` of each prefill row, one more position of each decode row."""
    rows = [_extend_row(req) for req in extends]
    rows += [PlannedRow(req, req.row, req.row_generation, req.kv_allocated_len, samples=True) for req in decodes]
    for planned in rows:
        planned.req.num_steps_in_flight += 1
        planned.req.num_samples_in_flight += planned.samples
    packed_rows = pack_int32([planned.row for planned in rows])
    packed_generations = pack_int32([planned.row_generation for planned in rows])
    return StepInFlight(step, rows, packed_rows, packed_generations)


def encode_step(step: int, extends: list[Req], decodes: list[Req], freed_rows: list[int]) -> ScheduleBatch:
    """The message: full data for requests whose table was never sent, columns of changes for the others."""
    return ScheduleBatch(
        step=step,
        freed_rows=pack_int32(freed_rows),
        new_reqs=[_new_req(req) for req in extends if req.num_sent_pages == 0],
        new_pages=[_take_new_pages([*extends, *decodes])],
        extend_rows=pack_int32([req.row for req in extends]),
        extend_starts=pack_int32([req.extend_range.start for req in extends]),
        extend_ends=pack_int32([req.extend_range.end for req in extends]),
        decode_rows=pack_int32([req.row for req in decodes]),
    )


def read_result(in_flight: StepInFlight, result: BatchResult) -> Iterator[RowResult]:
    """The result row by row; ProtocolError where it does not match the step, its rows and their generations."""
    if result.step != in_flight.step:
        raise ProtocolError(f"expected the result of step {in_flight.step}, got step {result.step}")
    if result.rows != in_flight.packed_rows or result.generations != in_flight.packed_generations:
        raise ProtocolError(f"the result of step {result.step} has other rows than were planned")
    token_ids = unpack_int32(result.token_ids)
    counts, lens, flags = (unpack_int32(column) for column in (result.num_tokens, result.row_lens, result.flags))
    if not len(counts) == len(lens) == len(flags) == len(in_flight.rows) or sum(counts) != len(token_ids):
        raise ProtocolError(f"the columns of the result of step {result.step} have different lengths")
    start = 0
    for planned, count, row_len, flag in zip(in_flight.rows, counts, lens, flags, strict=True):
        error = result.errors.get(planned.row, "The model failed on this request.") if flag & ROW_ERROR else None
        if error is None and count != planned.samples:
            raise ProtocolError(f"step {result.step}: {count} tokens for row {planned.row}, not {int(planned.samples)}")
        yield RowResult(planned, token_ids[start : start + count], row_len, error)
        start += count


def _extend_row(req: Req) -> PlannedRow:
    end = req.extend_range.end
    return PlannedRow(req, req.row, req.row_generation, end, samples=end == len(req.token_ids))


def _new_req(req: Req) -> NewReq:
    return NewReq(
        row=req.row,
        generation=req.row_generation,
        rid=req.rid,
        input_ids=req.token_ids.tobytes(),
        prompt_len=req.prompt_len,
        sampling_params=req.message.sampling_params,
        end_token_ids=tuple(sorted(req.end_token_ids)),
    )


def _take_new_pages(reqs: Iterable[Req]) -> PageColumns:
    """The pages that the workers do not know of yet; they count as sent from here on."""
    rows, counts, page_ids = [], [], []
    for req in reqs:
        num_new = len(req.page_ids) - req.num_sent_pages
        if num_new:
            rows.append(req.row)
            counts.append(num_new)
            page_ids += req.page_ids[req.num_sent_pages :]
            req.num_sent_pages += num_new
    return PageColumns(pack_int32(rows), pack_int32(counts), pack_int32(page_ids))
