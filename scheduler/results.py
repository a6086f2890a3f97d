"""What a step's result does to its requests: tokens are added one by one, and the one that ends a request is the last."""

from ..common.finish_reason import FINISH_LENGTH, FINISH_MATCHED_TOKEN, FinishReason
from ..common.messages import ROW_ERROR, BatchResult
from .output import abort_reason
from .req import Req, ReqStatus
from .schedule_batch import ProtocolError, ResultColumns, StepInFlight, read_result
from .scheduler_state import SchedulerState


def process_batch_result(state: SchedulerState, result: BatchResult) -> None:
    """Take the result of the oldest step in flight. Rows of requests that ended meanwhile are dropped."""
    if not state.in_flight:
        raise ProtocolError(f"a result of step {result.step} came, and no step is in flight")
    in_flight = state.in_flight.pop(0)
    columns = read_result(in_flight, result)
    state.stats.on_step(result.step_seconds)
    state.chunk_size.on_step(in_flight.num_prefill_tokens, len(in_flight.decodes), result.step_seconds)
    outputs = NewOutputs()
    start = _process_extends(state, in_flight, columns, outputs)
    _process_decodes(state, in_flight, columns, outputs, start)
    state.output.add_tokens(outputs.reqs, outputs.counts, outputs.token_ids)


class NewOutputs:
    """The tokens of a result that count, for the detokenizer."""

    def __init__(self) -> None:
        self.reqs: list[Req] = []
        self.counts: list[int] = []
        self.token_ids: list[int] = []

    def append(self, req: Req, new_ids: list[int]) -> None:
        """The next tokens of `req`."""
        self.reqs.append(req)
        self.counts.append(len(new_ids))
        self.token_ids += new_ids


def _process_extends(
    state: SchedulerState, in_flight: StepInFlight, columns: ResultColumns, outputs: NewOutputs
) -> int:
    """The prefill rows; returns where in `token_ids` the decode rows begin."""
    start = 0
    for index, req in enumerate(in_flight.extends):
        count, samples = columns.counts[index], in_flight.extend_samples[index]
        new_ids = columns.token_ids[start : start + count]
        start += count
        req.num_steps_in_flight -= 1
        if req.status is ReqStatus.ENDING:
            if req.num_steps_in_flight == 0:
                state.release_ended(req)
            continue
        if columns.flags[index] & ROW_ERROR:
            _fail(state, req, columns)
            continue
        if count != samples:
            raise _wrong_count(in_flight, req, count)
        req.kv_committed_len = in_flight.extend_ends[index]
        if samples:
            _process_first_tokens(state, req, new_ids, outputs)
        else:
            state.pool.cache_unfinished_req(req)
    return start


def _process_first_tokens(state: SchedulerState, req: Req, new_ids: list[int], outputs: NewOutputs) -> None:
    """The prompt is computed (anew, after a retraction), and its next token is here."""
    del state.prefilling[req.rid]
    if req.num_outputs == 0:
        state.note(req, "first_token")
    state.output.add_start(req)
    end = _append_tokens(req, new_ids)
    outputs.append(req, new_ids)
    state.pool.cache_unfinished_req(req)
    if end is not None:
        state.end(req, end)


def _process_decodes(
    state: SchedulerState, in_flight: StepInFlight, columns: ResultColumns, outputs: NewOutputs, start: int
) -> None:
    """The decode rows. This runs once for every token of the server, so calls are few and attributes are read once."""
    page_size, width = state.pool.page_size, in_flight.decode_width
    first = len(in_flight.extends)
    token_ids = columns.token_ids
    add_req, add_count, add_ids = outputs.reqs.append, outputs.counts.append, outputs.token_ids.extend
    for req, count, flag in zip(in_flight.decodes, columns.counts[first:], columns.flags[first:], strict=True):
        new_ids = token_ids[start : start + count]
        start += count
        req.num_steps_in_flight -= 1
        if req.status is ReqStatus.ENDING:
            if req.num_steps_in_flight == 0:
                state.release_ended(req)
            continue
        if flag & ROW_ERROR:
            _fail(state, req, columns)
            continue
        if not 0 < count <= width:
            raise _wrong_count(in_flight, req, count)
        end = _append_tokens(req, new_ids)
        add_req(req)
        add_count(len(new_ids))
        add_ids(new_ids)
        if width > 1:
            req.kv_allocated_len -= width - count
            req.num_left_to_plan -= count - 1
        kv_len = req.kv_committed_len = len(req.token_ids) - 1
        if kv_len % page_size < count:
            state.pool.cache_unfinished_req(req)
        if end is not None:
            state.end(req, end)


def _append_tokens(req: Req, new_ids: list[int]) -> FinishReason | None:
    """Add outputs up to the one that ends the request (`new_ids` is cut there); returns how it ends, if it does."""
    known_ids, max_len = req.token_ids, req.prompt_len + req.max_new_tokens
    old_len = len(known_ids)
    end: FinishReason
    for token_id in new_ids:
        known_ids.append(token_id)
        if token_id in req.end_token_ids:
            end = FINISH_MATCHED_TOKEN(token_id)
            break
        if len(known_ids) >= max_len:
            end = FINISH_LENGTH(req.max_new_tokens)
            break
    else:
        return None
    del new_ids[len(known_ids) - old_len :]
    return end


def _fail(state: SchedulerState, req: Req, columns: ResultColumns) -> None:
    message = columns.errors.get(req.row, "The model failed on this request.")
    state.end(req, abort_reason(message, 500))


def _wrong_count(in_flight: StepInFlight, req: Req, count: int) -> ProtocolError:
    return ProtocolError(f"step {in_flight.step}: {count} tokens for row {req.row} are not what was planned")
