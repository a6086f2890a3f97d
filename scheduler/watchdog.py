"""Notices a step that does not come back, and says which ranks hold it up."""

from collections import deque


class StepTimeout(RuntimeError):
    """A step was not finished in time: the server must end."""


class Watchdog:
    """Knows the steps that were sent and not answered by all: the result, and an acknowledgement of every rank."""

    def __init__(self, tp_size: int, timeout_seconds: float) -> None:
        self._tp_size = tp_size
        self._timeout = timeout_seconds
        self._outstanding: deque[_Outstanding] = deque()
        self._full_since: float | None = None

    def on_sent(self, step: int, now: float, *, has_result: bool = True) -> None:
        """A step goes to all ranks; one that computes nothing has no result."""
        outstanding = _Outstanding(step, set(range(self._tp_size)), now)
        outstanding.has_result = not has_result
        self._outstanding.append(outstanding)

    def on_result(self, step: int, now: float) -> None:
        """Rank 0's result of a step is back."""
        for each in self._outstanding:
            if each.step == step:
                each.has_result = True
        self._drop_finished(now)

    def on_ack(self, rank: int, step: int, now: float) -> None:
        """A rank has finished a step."""
        for each in self._outstanding:
            if each.step == step:
                each.missing_ranks.discard(rank)
        self._drop_finished(now)

    def check(self, now: float, *, is_full: bool = False) -> None:
        """Raise StepTimeout if the oldest step, or a full link (`is_full`), has lasted for too long."""
        self._full_since = (self._full_since or now) if is_full else None
        if self._full_since is not None and now - self._full_since > self._timeout:
            raise StepTimeout(f"a link has been full for {self._timeout:g} s: its receiver does not take messages")
        if self._outstanding and now - self._outstanding[0].since > self._timeout:
            raise StepTimeout(self._describe(self._outstanding[0]))

    def _drop_finished(self, now: float) -> None:
        """Steps run one after another, so the next one's time begins when the one before it ends."""
        while self._outstanding and self._outstanding[0].has_result and not self._outstanding[0].missing_ranks:
            self._outstanding.popleft()
            if self._outstanding:
                self._outstanding[0].since = max(now, self._outstanding[0].since)

    def _describe(self, each: "_Outstanding") -> str:
        ranks = ", ".join(map(str, sorted(each.missing_ranks)))
        who = f"rank {ranks} has not acknowledged it" if ranks else "rank 0 has not sent its result"
        return f"step {each.step} has not returned within {self._timeout:g} s: {who}"


class _Outstanding:
    def __init__(self, step: int, missing_ranks: set[int], since: float) -> None:
        self.step = step
        self.missing_ranks = missing_ranks
        self.since = since
        self.has_result = False
