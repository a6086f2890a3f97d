"""What must be true of the requests between two events: one place each, rows, steps in flight and lengths that agree."""

from collections import Counter
from collections.abc import Iterator

from .req import NO_ROW, Req, ReqStatus
from .scheduler_state import SchedulerState

PLACES = {
    ReqStatus.WAITING: "waiting",
    ReqStatus.GRAMMAR: "grammar_queue",
    ReqStatus.RETRACTED: "waiting",
    ReqStatus.PREFILLING: "chunked",
    ReqStatus.RUNNING: "running",
    ReqStatus.ENDING: "ending",
}


def with_row(state: SchedulerState) -> list[Req]:
    """The requests that hold pages and a row."""
    return [req for req in state.requests.values() if not req.is_queued]


def check_places(state: SchedulerState) -> Iterator[str]:
    """Every request is in the one place that its status says, and nowhere else."""
    places: list[tuple[str, Req]] = [("waiting", req) for req in state.waiting_queue]
    places += [("grammar_queue", req) for req in state.grammar_queue]
    places += [("running", req) for req in state.running_batch.values()]
    places += [("ending", req) for req in state.ending.values()]
    places += [("chunked", state.chunked_req)] if state.chunked_req else []
    for name, req in places:
        if state.requests.get(req.rid) is not req or PLACES.get(req.status) != name:
            yield f"request {req.rid} is {req.status.name} and in {name}"
    if len(places) != len(state.requests):
        yield f"{len(state.requests)} requests are in {len(places)} places"
    prefilling = {state.chunked_req} if state.chunked_req else set()
    for step in state.in_flight:
        for req, does_sample in zip(step.extends, step.extend_samples, strict=True):
            if does_sample and req.status is ReqStatus.RUNNING:
                prefilling.add(req)
    if set(state.prefilling.values()) != prefilling:
        yield f"{list(state.prefilling)} count as prefilling, not {[req.rid for req in prefilling]}"


def check_families(state: SchedulerState) -> Iterator[str]:
    """The children of a request for several answers are those that live, and one of them at most counts the prompt."""
    families: dict[str, dict[str, Req]] = {}
    for req in state.requests.values():
        if req.family is not None:
            families.setdefault(req.family, {})[req.rid] = req
    if families != state.families:
        yield f"families {list(state.families)} are known, not {list(families)}, or have other children"
    for rid, children in families.items():
        if sum(child.counts_prompt for child in children.values()) > 1:
            yield f"the prompt of {rid} counts more than once"


def check_queue(state: SchedulerState) -> Iterator[str]:
    """The queue is in order of arrival, knows its tokens, and whoever waits holds nothing."""
    queue = state.waiting_queue
    num_tokens, last_arrival = 0, float("-inf")
    for req in queue:
        num_tokens += req.num_waiting_tokens
        if req.arrival < last_arrival:
            yield f"request {req.rid} waits behind one that came later"
        last_arrival = req.arrival
        if req.row != NO_ROW or state.is_in_flight(req) or req.num_sent_pages:
            yield f"request {req.rid} waits, and holds row {req.row}"
    yield from state.grammar_queue.broken_invariants()
    if queue.num_tokens != num_tokens:
        yield f"the queue counts {queue.num_tokens} tokens, not {num_tokens}"


def check_rows(state: SchedulerState) -> Iterator[str]:
    """Every row has one owner; the workers hold those in use and those that they are still to be told to free."""
    used = [req.row for req in with_row(state)]
    rows = sorted([*state.free_rows, *used])
    if rows != list(range(state.config.max_running_requests)):
        yield f"rows are lost, or have two owners: {used} are in use, {state.free_rows} are free"
    if any(req.row != row for row, req in state.running_batch.items()):
        yield "a running request is filed under another row"
    if sorted(state.worker_rows) != sorted([*used, *state.freed_rows]):
        yield f"the workers hold rows {state.worker_rows}; {used} are in use, {state.freed_rows} will be freed"


def check_steps(state: SchedulerState) -> Iterator[str]:
    """Steps in flight are the last ones planned, no more than may be, and all their requests are known."""
    in_flight = state.in_flight
    steps = [step.step for step in in_flight]
    first_step = steps[0] if steps else state.next_step
    if steps != [step for step in range(first_step, state.next_step) if step not in state.empty_steps]:
        yield f"steps {[step.step for step in in_flight]} are in flight, and {state.next_step} is next"
    if len(in_flight) > state.config.max_steps_in_flight:
        yield f"{len(in_flight)} steps are in flight"
    for step in in_flight:
        for req in (*step.extends, *step.decodes):
            if state.requests.get(req.rid) is not req:
                yield f"request {req.rid} is in flight, and unknown"


def check_reqs(state: SchedulerState) -> Iterator[str]:
    """The lengths of each request with a row follow from its tokens and the steps in flight."""
    last_step: dict[Req, int] = {}
    num_samples: Counter[Req] = Counter()
    num_slots: Counter[Req] = Counter()
    for step in state.in_flight:
        last_step.update(dict.fromkeys((*step.extends, *step.decodes), step.step))
        for req, does_sample in zip(step.extends, step.extend_samples, strict=True):
            num_samples[req] += does_sample
            num_slots[req] += does_sample
        for req in step.decodes:
            num_samples[req] += 1
            num_slots[req] += step.decode_width
    for req in with_row(state):
        if req.last_step != last_step.get(req, req.last_step) or state.is_in_flight(req) != (req in last_step):
            yield f"request {req.rid}: step {req.last_step} is its last one, not {last_step.get(req)}"
        if req.status is not ReqStatus.ENDING:
            yield from _check_lens(req, state.pool.page_size)
            yield from _check_plan(req, num_samples[req], num_slots[req], state.pool.page_size)


def _check_lens(req: Req, page_size: int) -> Iterator[str]:
    """Committed and allocated KV lie in the page table, which the workers know."""
    num_slots = len(req.page_ids) * page_size
    if num_slots != req.num_slots:
        yield f"request {req.rid}: its page table holds {num_slots} tokens, not {req.num_slots}"
    if not req.num_tree_pages * page_size <= req.kv_committed_len <= req.kv_allocated_len <= num_slots:
        yield f"request {req.rid}: its cache lengths are out of order"
    if req.num_sent_pages != len(req.page_ids):
        yield f"request {req.rid}: the workers know {req.num_sent_pages} of its {len(req.page_ids)} pages"


def _check_plan(req: Req, num_samples: int, num_slots: int, page_size: int) -> Iterator[str]:
    """What is planned is what is known and in flight, and never more than `max_new_tokens`."""
    num_left = req.max_new_tokens - req.num_outputs - num_samples
    if req.num_left_to_plan != num_left or num_left < 0:
        yield f"request {req.rid}: {req.num_left_to_plan} outputs are left to plan, not {num_left}"
    known_len = len(req.token_ids)
    if req.status is ReqStatus.RUNNING and req.kv_allocated_len != known_len - 1 + num_slots:
        yield f"request {req.rid}: {req.kv_allocated_len} slots are planned for {known_len} tokens"
    if req.status is ReqStatus.PREFILLING and not (
        req.kv_allocated_len < known_len and req.kv_allocated_len % page_size == 0
    ):
        yield f"request {req.rid}: its chunks end at {req.kv_allocated_len}"
