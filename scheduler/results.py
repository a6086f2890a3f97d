"""What a step's result does to its requests: tokens are added one by one, and the one that ends a request is the last."""

from collections import Counter
from itertools import groupby

from ..common.batch_messages import ROW_ERROR, ROW_REFUSED, BatchResult
from ..common.finish_reason import FINISH_LENGTH, FINISH_MATCHED_TOKEN, FINISHED_GRAMMAR, FinishReason
from .output import abort_reason
from .req import Req, ReqStatus
from .schedule_batch import ProtocolError, ResultColumns, StepInFlight, read_result
from .scheduler_state import SchedulerState

LIVE = (ReqStatus.RUNNING, ReqStatus.PREFILLING)


def process_batch_result(state: SchedulerState, result: BatchResult) -> None:
    """Take the result of the oldest step in flight. Rows of requests that ended meanwhile are dropped."""
    if not state.in_flight:
        raise ProtocolError(f"a result of step {result.step} came, and no step is in flight")
    in_flight = state.in_flight.pop(0)
    columns = read_result(in_flight, result)
    state.stats.on_step(result.step_seconds, len(columns.token_ids))
    if not any(flag & ROW_ERROR for flag in columns.flags):  # a row that failed may have computed nothing
        state.chunk_size.on_step(in_flight.work, result.step_seconds)
    ended_before = [req for req in state.ending.values() if req.last_step == in_flight.step]
    _fail_rows(state, in_flight, columns)
    num_first_tokens = _process_extends(state, in_flight, columns)
    _process_decodes(state, in_flight, columns, num_first_tokens)
    for req in columns.ended_reqs:
        if req.status in LIVE:
            state.end(req, FINISHED_GRAMMAR())
    for req in ended_before:
        state.release_ended(req)


def _fail_rows(state: SchedulerState, in_flight: StepInFlight, columns: ResultColumns) -> None:
    """End the requests whose row failed: their other columns say nothing."""
    if not any(columns.flags):
        return
    for req, flag in zip([*in_flight.extends, *in_flight.decodes], columns.flags, strict=True):
        if flag & ROW_ERROR and req.status in LIVE:
            message = columns.errors.get(req.row, "The model failed on this request.")
            state.grammar_queue.retire(req)
            state.end(req, abort_reason(message, 400 if flag & ROW_REFUSED else 500))


def _process_extends(state: SchedulerState, in_flight: StepInFlight, columns: ResultColumns) -> int:
    """The prefill rows; returns how many tokens they brought."""
    start = 0
    for index, req in enumerate(in_flight.extends):
        count = columns.counts[index]
        new_ids = columns.token_ids[start : start + count]
        start += count
        if req.status not in LIVE:
            continue
        if count != in_flight.extend_samples[index]:
            raise _wrong_count(in_flight, req, count)
        req.kv_committed_len = in_flight.extend_ends[index]
        if req.logprob_start < req.prompt_len - 1:
            _add_prompt_logprobs(in_flight, req, columns)
        if count and req.message.pooling is not None:
            _process_embedding(state, req, columns)
        elif count:
            _process_first_token(state, req, new_ids[0], columns)
        else:
            state.pool.cache_unfinished_req(req)
    return start


def _add_prompt_logprobs(in_flight: StepInFlight, req: Req, columns: ResultColumns) -> None:
    """Those of the chunk that is computed; ProtocolError if they are not all there."""
    new = columns.prompt_logprobs.get(req.row)
    end = max(req.logprob_start, min(req.kv_committed_len, req.prompt_len - 1))
    num_new = new.num_tokens if new else 0
    if num_new != end - req.logprob_start:
        raise ProtocolError(f"step {in_flight.step}: {num_new} log-probabilities of row {req.row} came up to {end}")
    if new:
        req.prompt_logprobs.add(new)
    req.logprob_start = end


def _process_embedding(state: SchedulerState, req: Req, columns: ResultColumns) -> None:
    """The prompt of a request for a vector is computed: it ends, and the token behind it is dropped."""
    embedding = columns.embeddings.get(req.row)
    if embedding is None:
        state.end(req, abort_reason("The model gave no finite vector for this prompt.", 500))
        return
    state.output.add_embedding(req, embedding)
    state.end(req, FINISH_LENGTH(0))


def _process_first_token(state: SchedulerState, req: Req, token_id: int, columns: ResultColumns) -> None:
    """The prompt is computed (anew, after a retraction), and its next token is here."""
    del state.prefilling[req.rid]
    if req.num_outputs == 0:
        state.note(req, "first_token")
    state.output.add_start(req)
    state.output.add_prompt_logprobs(req)
    if req.is_prompt_only:
        state.end(req, FINISH_LENGTH(0))
        return
    state.output.add_tokens([req], [1], [token_id])
    if req.row in columns.logprobs:
        state.output.add_logprobs(req, columns.logprobs[req.row])
    req.token_ids.append(token_id)
    state.pool.cache_unfinished_req(req)
    end = _find_end(req, token_id, columns)
    if end is not None:
        state.end(req, end)


def _process_decodes(
    state: SchedulerState, in_flight: StepInFlight, columns: ResultColumns, num_first_tokens: int
) -> None:
    """The decode rows. This runs once for every token of the server: few calls, and no attribute is read twice."""
    width, page_size = in_flight.decode_width, state.pool.page_size
    counts, token_ids = columns.counts[len(in_flight.extends) :], columns.token_ids[num_first_tokens:]
    owners = _owners_of_tokens(in_flight, counts)
    late = set()  # indexes of the tokens whose request had ended before
    for index, (req, token_id) in enumerate(zip(owners, token_ids, strict=True)):
        if req.status is not ReqStatus.RUNNING:
            late.add(index)
            continue
        known_ids = req.token_ids
        kv_len = req.kv_committed_len = len(known_ids)
        known_ids.append(token_id)
        if kv_len % page_size == 0:
            state.pool.cache_unfinished_req(req)
        if token_id in req.end_token_ids or kv_len + 1 >= req.max_len:
            end = _find_end(req, token_id, columns)
            assert end is not None
            state.end(req, end)
    if width > 1:
        _give_back_reserve(in_flight, counts)
    if late:
        owners = [req for index, req in enumerate(owners) if index not in late]
        token_ids = [token_id for index, token_id in enumerate(token_ids) if index not in late]
    if columns.logprobs:
        for req, num_tokens in Counter(owners).items():
            if req.row in columns.logprobs:
                state.output.add_logprobs(req, columns.logprobs[req.row].first(num_tokens))
    if width == 1:
        state.output.add_tokens(owners, [1] * len(owners), token_ids)
    else:
        groups = [(req, len(list(tokens))) for req, tokens in groupby(owners)]
        state.output.add_tokens([req for req, _ in groups], [count for _, count in groups], token_ids)


def _owners_of_tokens(in_flight: StepInFlight, counts: list[int]) -> list[Req]:
    """The request of each token of the decode rows; ProtocolError for a row with too few or too many."""
    rows, width = in_flight.decodes, in_flight.decode_width
    if width == 1 and 0 not in counts and len(counts) == sum(counts):
        return rows
    for req, count in zip(rows, counts, strict=True):
        if count > width or (count == 0 and req.status is ReqStatus.RUNNING):
            raise _wrong_count(in_flight, req, count)
    return [req for req, count in zip(rows, counts, strict=True) for _ in range(count)]


def _give_back_reserve(in_flight: StepInFlight, counts: list[int]) -> None:
    """What was planned for tokens that did not come."""
    for req, count in zip(in_flight.decodes, counts, strict=True):
        if req.status is ReqStatus.RUNNING:
            req.kv_allocated_len -= in_flight.decode_width - count
            req.num_left_to_plan -= count - 1


def _find_end(req: Req, token_id: int, columns: ResultColumns) -> FinishReason | None:
    """How `token_id`, the last one of a request, ends it, if it does."""
    if token_id in req.end_token_ids:
        return FINISH_MATCHED_TOKEN(token_id)
    if req in columns.ended_reqs:
        return FINISHED_GRAMMAR()
    if req.num_outputs >= req.max_new_tokens:
        return FINISH_LENGTH(req.num_outputs)
    return None


def _wrong_count(in_flight: StepInFlight, req: Req, count: int) -> ProtocolError:
    return ProtocolError(f"step {in_flight.step}: {count} tokens for row {req.row} are not what was planned")
