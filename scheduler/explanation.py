"""What happened to each request, and why: the journal behind `GET /debug/requests/{rid}` and `millstream explain`.

What is noted, with the numbers that go with it (a number may be a word):

    grammar      waiting: it waits until its grammar is compiled, with so many others
    queued       position, queue_tokens, policy
    refused      status_code, reason: it never became a request
    blocked      reason, steps, last_step, for_seconds, and the budgets of the last time: repeats are one event
    waited       seconds by what kept the first of the queue out, while this one waited behind it
    backfilled   past: it went ahead of a request that is blocked
    admitted     cached_tokens, new_tokens, row, waited_seconds
    chunk        start, end: positions of the prompt that a step computes
    first_token
    retracted    reason, outputs
    preempted    by
    text_ended   tokens: a stop string or regex ended it after so many outputs
    ended        reason, tokens, retractions, steps: from its first step to its end
    omitted      events: how many were dropped from the middle of a long story

Nothing is noted per decode step. Events are kept as flat tuples and become `ExplainedEvent`s when somebody asks.
"""

from collections import OrderedDict
from collections.abc import Iterator

from ..common.messages import ExplainedEvent
from .req import Req

MIN_WAITED_SECONDS = 0.001
BEGINS_TO_WAIT = {"queued", "retracted", "preempted"}
MAX_EVENTS = 64  # of one request; the oldest half and the newest ones are kept

Number = int | float | str
Event = tuple[Number, ...]  # now, step, what, then name and number in turn


class Blocked:
    """Repeats of one reason to wait."""

    __slots__ = ("last_now", "last_step", "now", "num_steps", "numbers", "step")

    def __init__(self, now: float, step: int, numbers: dict[str, Number]) -> None:
        self.now = self.last_now = now
        self.step = self.last_step = step
        self.num_steps = 1
        self.numbers = numbers

    def repeat(self, now: float, step: int, numbers: dict[str, Number]) -> None:
        """The same reason again; a step counts once, however often it was tried."""
        self.num_steps += step != self.last_step
        self.last_now, self.last_step, self.numbers = now, step, numbers

    def event(self, reason: str) -> Event:
        """All repeats as one event, at the time of the first, with the numbers of the last."""
        seconds = round(self.last_now - self.now, 6)
        numbers: dict[str, Number] = {
            "reason": reason,
            "steps": self.num_steps,
            "last_step": self.last_step,
            "for_seconds": seconds,
        }
        return _event(self.now, self.step, "blocked", numbers | self.numbers | numbers)


class QueueTime:
    """Since boot: how long each reason kept the first of the queue out."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._reason: str | None = None
        self._since = 0.0

    def switch(self, reason: str | None, now: float) -> None:
        """From now on `reason` keeps it out; None: nothing does, or nobody waits."""
        if self._reason is not None:
            self._seconds[self._reason] = self._seconds.get(self._reason, 0.0) + now - self._since
        self._reason, self._since = reason, now

    def until(self, now: float) -> dict[str, float]:
        """The seconds of each reason."""
        self.switch(self._reason, now)
        return dict(self._seconds)


class Story:
    """The life of one request, bounded."""

    __slots__ = (
        "arrival",
        "blocked",
        "blocked_seconds",
        "events",
        "first_omitted",
        "first_step",
        "num_omitted",
        "queue_time",
        "req",
        "text_tokens",
    )

    def __init__(self, arrival: float, req: Req | None) -> None:
        self.arrival = arrival
        self.req = req  # None once it has ended
        self.events: list[Event] = []
        self.blocked: dict[str, Blocked] = {}  # since the last event, by reason
        self.blocked_seconds = 0.0  # as the first of the queue, since it began to wait
        self.queue_time: dict[str, float] | None = None  # when it began to wait; None while it runs
        self.first_step: int | None = None
        self.text_tokens: int | None = None
        self.num_omitted = 0
        self.first_omitted: Event | None = None

    def append(self, event: Event) -> None:
        """Add an event after what has blocked the request until now."""
        if self.blocked:
            blocked, self.blocked = self.blocked, {}
            for reason, repeats in blocked.items():
                self.blocked_seconds += repeats.last_now - repeats.now
                self._append(repeats.event(reason))
        self._append(event)

    def waited(self, queue_time: dict[str, float], now: float, step: int) -> Event | None:
        """What kept the first of the queue out while this one waited behind it; None if it hardly did."""
        if self.queue_time is None:
            return None
        seconds = {reason: total - self.queue_time.get(reason, 0.0) for reason, total in queue_time.items()}
        blocked = self.blocked_seconds + sum(each.last_now - each.now for each in self.blocked.values())
        if sum(seconds.values()) <= blocked + MIN_WAITED_SECONDS:
            return None
        numbers: dict[str, Number] = {reason: round(total, 6) for reason, total in seconds.items() if total > 0}
        return _event(now, step, "waited", numbers)

    def _append(self, event: Event) -> None:
        self.events.append(event)
        if len(self.events) >= MAX_EVENTS:
            omitted = self.events.pop(MAX_EVENTS // 2)
            self.num_omitted += 1
            self.first_omitted = self.first_omitted or omitted

    def __iter__(self) -> Iterator[Event]:
        """All events in order, what blocks the request now included."""
        events = [*self.events, *(repeats.event(reason) for reason, repeats in self.blocked.items())]
        if self.first_omitted is not None:
            now, step = self.first_omitted[:2]
            middle = MAX_EVENTS // 2
            events.insert(middle, (now, step, "omitted", "events", self.num_omitted))
        return iter(events)


class Journal:
    """The stories of all live requests and of the last `max_requests` that ended."""

    def __init__(self, max_requests: int = 1000) -> None:
        self.max_requests = max_requests
        self._live: dict[str, Story] = {}
        self._ended: OrderedDict[str, Story] = OrderedDict()
        self._refused: OrderedDict[str, Story] = OrderedDict()  # apart: a burst of them pushes no story out
        self._queue_time = QueueTime()

    def __len__(self) -> int:
        return len(self._live) + len(self._ended) + len(self._refused)

    def note(self, req: Req, now: float, step: int, what: str, **numbers: Number) -> None:
        """Something happened to a request, when `step` was the next to be planned (or was being planned)."""
        story = self._live.get(req.rid) or self._begin(req)
        if what == "admitted":
            self._tell_wait(story, now, step)
            if story.first_step is None:
                story.first_step = step
        story.append(_event(now, step, what, numbers))
        if what in BEGINS_TO_WAIT:
            story.queue_time, story.blocked_seconds = self._queue_time.until(now), 0.0

    def queue_blocked(self, reason: str | None, now: float) -> None:
        """What keeps the first of the queue out from now on, and so all behind it; None: nothing, or nobody waits."""
        self._queue_time.switch(reason, now)

    def _tell_wait(self, story: Story, now: float, step: int) -> None:
        event = story.waited(self._queue_time.until(now), now, step)
        if event is not None:
            story.append(event)
        story.queue_time = None

    def blocked(self, req: Req, now: float, step: int, reason: str, **numbers: Number) -> None:
        """A budget or a rule, `reason`, kept the request out of this step; `numbers` say by how much.

        A reason is one of a few fixed words: what changes from step to step belongs into `numbers`.
        Repeats of one reason, with no other event between, are one event with the numbers of the last.
        """
        story = self._live.get(req.rid) or self._begin(req)
        repeats = story.blocked.get(reason)
        if repeats is None:
            story.blocked[reason] = Blocked(now, step, numbers)
        else:
            repeats.repeat(now, step, numbers)

    def end(self, req: Req, now: float, step: int, **numbers: Number) -> None:
        """The end of a request as the scheduler knows it: `numbers` say why (reason=..., message=...).

        Outputs, retractions and steps are added here. Once only: a second end of one request is ignored.
        """
        if req.rid in self._ended:
            return
        story = self._live.pop(req.rid, None) or Story(req.message.arrival, req)
        self._tell_wait(story, now, step)
        steps = 0 if story.first_step is None else step - story.first_step
        counts: dict[str, Number] = {"tokens": req.num_outputs, "retractions": req.num_retractions, "steps": steps}
        story.append(_event(now, step, "ended", numbers | counts))
        self._keep(self._ended, req.rid, story)

    def text_ended(self, rid: str, now: float, step: int, num_tokens: int) -> None:
        """The detokenizer's notice: text ended the request after `num_tokens` outputs; before or after `end`.

        From here on its `ended` says so, whatever end by token the scheduler saw. Unknown and repeated: ignored.
        """
        story = self._live.get(rid) or self._ended.get(rid)
        if story is not None and story.text_tokens is None:
            story.text_tokens = num_tokens
            story.append(_event(now, step, "text_ended", {"tokens": num_tokens}))

    def refused(self, rid: str, arrival: float, now: float, step: int, **numbers: Number) -> None:
        """A request that was turned away, and why (status_code=..., reason=...)."""
        story = Story(arrival, None)
        story.append(_event(now, step, "refused", numbers))
        self._keep(self._refused, rid, story)

    def explain(self, rid: str, now: float | None = None, step: int = 0) -> tuple[str | None, list[ExplainedEvent]]:
        """The status of a request (a ReqStatus in lower case; ended; None: unknown) and its events in order.

        With `now` also what a waiting request waits for at this moment.
        """
        story = self._live.get(rid) or self._ended.get(rid) or self._refused.get(rid)
        if story is None:
            return None, []
        events = list(story)
        waited = None if now is None else story.waited(self._queue_time.until(now), now, step)
        if waited is not None:
            events.append(waited)
        status = "ended" if story.req is None else story.req.status.name.lower()
        return status, [_explained(event, story) for event in events]

    def _begin(self, req: Req) -> Story:
        return self._live.setdefault(req.rid, Story(req.message.arrival, req))

    def _keep(self, kept: OrderedDict[str, Story], rid: str, story: Story) -> None:
        story.req = None
        kept[rid] = story
        if len(kept) > self.max_requests:
            kept.popitem(last=False)


def _event(now: float, step: int, what: str, numbers: dict[str, Number]) -> Event:
    event: list[Number] = [now, step, what]
    for item in numbers.items():
        event += item
    return tuple(event)


def _explained(event: Event, story: Story) -> ExplainedEvent:
    now, step, what, *rest = event
    numbers = {str(name): number for name, number in zip(rest[::2], rest[1::2], strict=True)}
    if what == "ended" and story.text_tokens is not None:
        numbers |= {"reason": "text", "tokens": story.text_tokens}
    return ExplainedEvent(round(float(now) - story.arrival, 6), int(step), str(what), numbers)
