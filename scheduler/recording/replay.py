"""Runs the scheduler over a recording, without workers: the same events must give the same decisions."""

from collections import deque
from itertools import chain
from pathlib import Path
from traceback import extract_tb
from typing import Any, NamedTuple

import msgspec

from ...common.batch_messages import BatchResult, ScheduleBatch
from ...common.messages import ControlReqOutput
from ...common.text_messages import BatchTokenIDOutput
from ..scheduler import Scheduler
from .decision_text import RowNames, differing_items, in_words
from .message_json import to_plain
from .recording import Decided, Decision, Event, Recording


class Difference(NamedTuple):
    """The first decision that is not the recorded one. `step` is that of the batch, or of the last batch before."""

    line: int
    step: int
    what: str  # the kind of decision
    field: str
    recorded: list[str]
    now: list[str]

    def __str__(self) -> str:
        lines = [f"line {self.line}, step {self.step}: {self.what}: {self.field}"]
        for side, items in (("recorded", self.recorded), ("now", self.now)):
            lines += [f"  {side + ':':<10}{item}" for item in items or ["nothing"]]
        return "\n".join(lines)


class ReplayReport(NamedTuple):
    """How far the replay came; `difference` is None where all is equal."""

    num_events: int
    num_decisions: int
    difference: Difference | None


def replay(recording: Recording) -> ReplayReport:
    """Replay until the end or the first difference; RecordingError for a line that can't be read."""
    return Replay(Scheduler(recording.header.config)).run(recording)


class Replay:
    """One run over a recording."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.num_events = self.num_decisions = 0
        self._step = -1
        self._planned: ScheduleBatch | None = None  # what the last plan event gave, until a decision line answers it
        self._replies: deque[ControlReqOutput] = deque()
        self._rows = RowNames()

    def run(self, recording: Recording) -> ReplayReport:
        """Every entry in order."""
        difference = None
        for entry in recording:
            difference = self._on_event(entry) if isinstance(entry, Event) else self._on_decision(entry)
            if difference is not None:
                break
        return ReplayReport(self.num_events, self.num_decisions, difference)

    def _on_event(self, event: Event) -> Difference | None:
        if self._planned is not None:
            return self._compare(event.line, None, self._planned)
        self.num_events += 1
        if event.what == "close":
            return self._left_over(event.line)
        try:
            self._call(event)
        except Exception as error:  # noqa: BLE001 - whatever a scheduler does wrong is what a replay is to show
            return self._failure(event.line, f"event {event.what}", error)
        return None

    def _left_over(self, line: int) -> Difference | None:
        """What the scheduler decides now and the recorded one did not, at the end of a recording."""
        left = [self.scheduler.take_output(), *self._replies, *self._new_replies()]
        return next((self._compare(line, None, each) for each in left if each is not None), None)

    def _failure(self, line: int, what: str, error: Exception) -> Difference:
        place = extract_tb(error.__traceback__)[-1]
        text = " ".join(f"{type(error).__name__}: {error}".split())
        failure = f"{text} ({Path(place.filename).name}:{place.lineno}, {place.name})"
        return Difference(line, self._step, what, "the scheduler failed", [], [failure])

    def _call(self, event: Event) -> None:
        scheduler, now, message = self.scheduler, event.now, event.message
        if isinstance(message, BatchResult):
            scheduler.process_batch_result(message, now)
        elif message is not None:
            scheduler.handle(message, now)
        elif event.what == "plan":
            self._planned = scheduler.get_next_batch_to_run(now)
        elif event.what == "snapshot":
            scheduler.take_snapshot(now)
        else:
            scheduler.check_when_idle()

    def _on_decision(self, decision: Decision) -> Difference | None:
        self.num_decisions += 1
        recorded = decision.message
        try:
            now = self._decide(recorded)
        except Exception as error:  # noqa: BLE001 - as above
            return self._failure(decision.line, type(recorded).__name__, error)
        if recorded != now and (now is None or to_plain(recorded) != to_plain(now)):  # NaN is as good as NaN
            return self._compare(decision.line, recorded, now)
        if isinstance(recorded, ScheduleBatch):
            self._step = recorded.step
            self._rows.learn(recorded)
        return None

    def _decide(self, recorded: Decided) -> Decided | None:
        """What the scheduler gives where the recorded one gave `recorded`."""
        if isinstance(recorded, ScheduleBatch):
            planned, self._planned = self._planned, None
            return planned
        if isinstance(recorded, BatchTokenIDOutput):
            return self.scheduler.take_output()
        self._replies += self._new_replies()
        return self._replies.popleft() if self._replies else None

    def _new_replies(self) -> list[ControlReqOutput]:
        return [each for each in self.scheduler.take_replies() if isinstance(each, ControlReqOutput)]

    def _compare(self, line: int, recorded: Decided | None, now: Decided | None) -> Difference:
        """The first field that differs, in words; as JSON where the words are the same."""
        what = type(recorded or now).__name__
        step = max((each.step for each in (recorded, now) if isinstance(each, ScheduleBatch)), default=self._step)
        if recorded is None or now is None:
            sides = [["none"] if each is None else _summary(each, self._rows) for each in (recorded, now)]
            return Difference(line, step, what, "one side has none", *sides)
        fields = [in_words(each, self._rows) for each in (recorded, now)]
        for name in fields[0]:
            if fields[0][name] != fields[1][name]:
                return Difference(line, step, what, name, *differing_items(fields[0][name], fields[1][name]))
        return Difference(line, step, what, *_innermost("", to_plain(recorded), to_plain(now)))


def _innermost(where: str, recorded: Any, now: Any) -> tuple[str, list[str], list[str]]:
    """The path of the first thing that differs in two plain messages, and the two."""
    if isinstance(recorded, dict) and isinstance(now, dict):
        name = next(name for name in chain(recorded, now) if recorded.get(name) != now.get(name))
        return _innermost(f"{where}.{name}".lstrip("."), recorded.get(name), now.get(name))
    if isinstance(recorded, list) and isinstance(now, list) and len(recorded) == len(now):
        place = next(place for place, pair in enumerate(zip(recorded, now, strict=True)) if pair[0] != pair[1])
        return _innermost(f"{where}[{place}]", recorded[place], now[place])
    return where, _as_json(recorded), _as_json(now)


def _as_json(plain: Any) -> list[str]:
    return [] if plain is None else [msgspec.json.encode(plain).decode()]


def _summary(decision: Decided, rows: RowNames) -> list[str]:
    return [f"{name}: {', '.join(items)}" for name, items in in_words(decision, rows).items() if items]
