"""A decision of the scheduler in words: what each row does, what each request gets. For the report of a replay."""

import msgspec

from ...common.batch_messages import NewReq, PageColumns, ScheduleBatch
from ...common.messages import ControlReqOutput, unpack_int32
from ...common.text_messages import BatchTokenIDOutput, RequestEnd, StreamStart
from .message_json import to_plain
from .recording import Decided

MAX_ITEMS = 6

Field = dict[str, list[str]]  # what a decision says, by field: one item for each row, request or page list


class RowNames:
    """Which request holds which row, as the batches say."""

    def __init__(self) -> None:
        self._rids: dict[int, str] = {}

    def learn(self, batch: ScheduleBatch) -> None:
        """A batch was sent."""
        self._rids.update({new_req.row: new_req.rid for new_req in batch.new_reqs})

    def __getitem__(self, row: int) -> str:
        return f"row {row} ({self._rids[row]})" if row in self._rids else f"row {row}"


def in_words(decision: Decided | None, rows: RowNames) -> Field:
    """The decision by field; empty for None."""
    if isinstance(decision, ScheduleBatch):
        return _batch(decision, rows)
    if isinstance(decision, BatchTokenIDOutput):
        return _output(decision)
    if isinstance(decision, ControlReqOutput):
        answer = "done" if decision.success else "refused"
        return {"reply": [f"{decision.request_id}: {answer}, {decision.message!r}"]}
    return {}


def differing_items(recorded: list[str], now: list[str]) -> tuple[list[str], list[str]]:
    """What stands on one side only; where both hold the same items, the first place where their order differs."""
    only_recorded = [item for item in recorded if item not in set(now)]
    only_now = [item for item in now if item not in set(recorded)]
    if only_recorded or only_now:
        return _some(only_recorded), _some(only_now)
    for place, (left, right) in enumerate(zip(recorded, now, strict=False)):
        if left != right:
            return [f"{left} at place {place}"], [f"{right} at place {place}"]
    return [f"{len(recorded)} items"], [f"{len(now)} items"]


def _batch(batch: ScheduleBatch, rows: RowNames) -> Field:
    rows.learn(batch)
    extends = zip(*map(unpack_int32, (batch.extend_rows, batch.extend_starts, batch.extend_ends)), strict=True)
    return {
        "step": [str(batch.step)],
        "freed rows": [f"row {row}" for row in unpack_int32(batch.freed_rows)],
        "new requests": [_new_req(new_req) for new_req in batch.new_reqs],
        "prefill": [f"{rows[row]} computes [{start}, {end})" for row, start, end in extends],
        "decodes": [rows[row] for row in unpack_int32(batch.decode_rows)],
        "decode width": [str(batch.decode_width)],
        "new grammars": [f"grammar {number}" for number in batch.new_grammars],
        "freed grammars": [f"grammar {number}" for number in unpack_int32(batch.freed_grammars)],
        "new pages": [item for group in batch.new_pages for item in _new_pages(group, rows)],
    }


def _new_req(new_req: NewReq) -> str:
    num_tokens = len(unpack_int32(new_req.input_ids))
    lens = f"{num_tokens} tokens, {new_req.prompt_len} of them prompt"
    return f"row {new_req.row} is {new_req.rid} (generation {new_req.generation}, {lens})"


def _new_pages(group: PageColumns, rows: RowNames) -> list[str]:
    page_ids, items, start = unpack_int32(group.page_ids), [], 0
    for row, count in zip(unpack_int32(group.rows), unpack_int32(group.counts), strict=True):
        items.append(f"{rows[row]} gets {_ranges(page_ids[start : start + count])}")
        start += count
    return items


def _output(output: BatchTokenIDOutput) -> Field:
    token_ids, tokens, start = unpack_int32(output.token_ids), [], 0
    columns = map(unpack_int32, (output.num_tokens, output.generations, output.cached_tokens))
    for rid, count, generation, cached_tokens in zip(output.rids, *columns, strict=True):
        ids = token_ids[start : start + count]
        tokens.append(f"{rid}: {ids} (generation {generation}, {cached_tokens} cached)")
        start += count
    return {
        "starts": [_start(each) for each in output.starts],
        "tokens": tokens,
        "ends": [_end(each) for each in output.ends],
    }


def _start(start: StreamStart) -> str:
    return f"{start.rid}: prompt of {start.prompt_len} tokens"


def _end(end: RequestEnd) -> str:
    reason = msgspec.json.encode(end.finish_reason.to_json()).decode()
    stats = msgspec.json.encode(to_plain(end.stats)).decode()
    return f"{end.rid}: after {end.num_tokens} tokens, {reason}, {stats}"


def _ranges(values: list[int]) -> str:
    """[4, 5, 6, 9] -> "pages 4-6 9"."""
    words: list[str] = []
    first = 0
    for place, value in enumerate(values):
        if place + 1 == len(values) or values[place + 1] != value + 1:
            words.append(str(value) if place == first else f"{values[first]}-{value}")
            first = place + 1
    return f"pages {' '.join(words)}"


def _some(items: list[str]) -> list[str]:
    num_more = len(items) - MAX_ITEMS
    return [*items[:MAX_ITEMS], f"and {num_more} more"] if num_more > 0 else items
