"""A step as the scheduler keeps it while it is in flight, and as it goes to the workers."""

from collections.abc import Collection, Iterable
from typing import NamedTuple

import msgspec

from ..common.batch_messages import ROW_GRAMMAR_ENDED, BatchResult, NewReq, PageColumns, ScheduleBatch
from ..common.logprobs import LogprobReq, TokenLogprobs
from ..common.messages import pack_int32, unpack_int32
from .req import Req
from .step_cost import StepWork, count_pairs


class ProtocolError(RuntimeError):
    """A worker's result does not answer the step that was sent: the server must end."""


class StepInFlight(NamedTuple):
    """A step whose result is not back. Its rows, in the order of the result: `extends`, then `decodes`.

    Prefill row i computes the KV of `extends[i]` up to `extend_ends[i]`, and samples where that is all known tokens.
    A decode row may bring up to `decode_width` tokens.
    """

    step: int
    extends: list[Req]
    extend_ends: list[int]
    extend_samples: list[bool]
    decodes: list[Req]
    decode_width: int
    work: StepWork
    packed_rows: bytes
    packed_generations: bytes


class ResultColumns(NamedTuple):
    """A checked result, one entry a row: `token_ids` is flat, `counts[i]` of them belong to row i; the rest is by row."""

    counts: list[int]
    flags: list[int]
    token_ids: list[int]
    errors: dict[int, str]
    logprobs: dict[int, TokenLogprobs]
    prompt_logprobs: dict[int, TokenLogprobs]
    embeddings: dict[int, bytes]
    ended_reqs: Collection[Req]  # whose grammar allows nothing more


def plan_step(step: int, extends: list[Req], decodes: list[Req], decode_width: int) -> StepInFlight:
    """Note what a step computes: `extend_range` of each prefill row, up to `decode_width` positions of a decode row."""
    starts = [req.extend_range.start for req in extends]
    ends = [req.extend_range.end for req in extends]
    samples = [req.extend_range.end == len(req.token_ids) for req in extends]
    for req, does_sample in zip(extends, samples, strict=True):
        req.last_step = step
        req.num_left_to_plan -= does_sample
    rows = [*extends, *decodes]
    return StepInFlight(
        step,
        extends,
        ends,
        samples,
        decodes,
        decode_width,
        StepWork(sum(ends) - sum(starts), sum(map(count_pairs, starts, ends)), len(decodes)),
        pack_int32([req.row for req in rows]),
        pack_int32([req.row_generation for req in rows]),
    )


def encode_step(in_flight: StepInFlight, with_new_pages: Iterable[Req], freed_rows: list[int]) -> ScheduleBatch:
    """The message: full data for requests whose table was never sent, columns of changes for the others."""
    extends = in_flight.extends
    return ScheduleBatch(
        step=in_flight.step,
        freed_rows=pack_int32(freed_rows),
        new_reqs=[_new_req(req) for req in extends if req.num_sent_pages == 0],
        new_pages=[_take_new_pages([*extends, *with_new_pages])],
        extend_rows=pack_int32([req.row for req in extends]),
        extend_starts=pack_int32([req.extend_range.start for req in extends]),
        extend_ends=pack_int32(in_flight.extend_ends),
        decode_rows=in_flight.packed_rows[4 * len(extends) :],
        decode_width=in_flight.decode_width,
    )


def announce_step(step: int) -> ScheduleBatch:
    """A step that computes nothing: `with_grammars` gives it something to say."""
    none = pack_int32([])
    return ScheduleBatch(step, none, [], [PageColumns(none, none, none)], none, none, none, none)


def with_grammars(batch: ScheduleBatch, news: tuple[dict[int, str], list[int]]) -> ScheduleBatch:
    """The batch, with new grammars by number and those that are used no more."""
    new_grammars, freed = news
    if not (new_grammars or freed):
        return batch
    return msgspec.structs.replace(batch, new_grammars=new_grammars, freed_grammars=pack_int32(freed))


def read_result(in_flight: StepInFlight, result: BatchResult) -> ResultColumns:
    """The result's columns; ProtocolError where it does not match the step, its rows and their generations."""
    if result.step != in_flight.step:
        raise ProtocolError(f"expected the result of step {in_flight.step}, got step {result.step}")
    if result.rows != in_flight.packed_rows or result.generations != in_flight.packed_generations:
        raise ProtocolError(f"the result of step {result.step} has other rows than were planned")
    token_ids = unpack_int32(result.token_ids)
    counts, flags = unpack_int32(result.num_tokens), unpack_int32(result.flags)
    num_rows = len(in_flight.packed_rows) // 4
    if not len(counts) == len(flags) == num_rows or sum(counts) != len(token_ids) or min(counts, default=0) < 0:
        raise ProtocolError(f"the columns of the result of step {result.step} do not fit its {num_rows} rows")
    more = (result.errors, result.logprobs, result.prompt_logprobs, result.embeddings, _ended_reqs(in_flight, flags))
    return ResultColumns(counts, flags, token_ids, *more)


def _ended_reqs(in_flight: StepInFlight, flags: list[int]) -> Collection[Req]:
    if not any(flags):
        return ()
    rows = zip([*in_flight.extends, *in_flight.decodes], flags, strict=True)
    return dict.fromkeys(req for req, flag in rows if flag & ROW_GRAMMAR_ENDED)


def _new_req(req: Req) -> NewReq:
    return NewReq(
        row=req.row,
        generation=req.row_generation,
        rid=req.rid,
        input_ids=req.token_ids.tobytes(),
        prompt_len=req.prompt_len,
        sampling_params=req.message.sampling_params,
        end_token_ids=tuple(sorted(req.end_token_ids)),
        logprobs=_logprobs(req),
        grammar=req.grammar,
        pooling=req.message.pooling,
    )


def _logprobs(req: Req) -> LogprobReq | None:
    """What is wanted still: those of the prompt's beginning may be there from before a retraction."""
    wanted = req.message.logprobs
    return wanted and msgspec.structs.replace(wanted, start_len=req.logprob_start)


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
