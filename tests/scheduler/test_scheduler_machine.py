"""The whole scheduler as a state machine: hypothesis picks the events, and shrinks what goes wrong."""

from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from millstream.common.messages import PAUSE_MODES
from tests.scheduler.storm import NONSENSE, Storm
from tests.scheduler.storm_end import finish
from tests.scheduler.storm_set_up import SHARED_LENS, draw_ask, draw_set_up

pytestmark = pytest.mark.timeout(600)  # a failure is shrunk, which takes its time
randoms = st.randoms(use_true_random=False)
indices = st.integers(0, 30)


class SchedulerMachine(RuleBasedStateMachine):
    """The events of a storm; the invariants are checked after each."""

    storm: Storm

    @initialize(rng=randoms, shared_lens=st.sampled_from(SHARED_LENS), num_requests=st.integers(1, 6))
    def start(self, rng: Random, shared_lens: tuple[int, ...], num_requests: int) -> None:
        self.storm = Storm(draw_set_up(rng), shared_lens)
        for _ in range(num_requests):
            self.storm.ask(draw_ask(rng, shared_lens))

    def rid(self, index: int) -> str:
        """One of all that were asked; the last ones for low numbers."""
        rids = list(self.storm.asked)
        return rids[-1 - index % len(rids)]

    @rule(rng=randoms, num_requests=st.integers(1, 5))
    def ask(self, rng: Random, num_requests: int) -> None:
        for _ in range(num_requests):
            self.storm.ask(draw_ask(rng, self.storm.shared_lens))

    @rule()
    def plan(self) -> None:
        self.storm.plan()

    @precondition(lambda self: self.storm.harness.results)
    @rule()
    def answer(self) -> None:
        self.storm.answer()

    @rule(num_steps=st.integers(1, 12), num_ahead=st.integers(1, 2))
    def steps(self, num_steps: int, num_ahead: int) -> None:
        self.storm.steps(num_steps, num_ahead)

    @rule(rng=randoms)
    def ask_and_go_on(self, rng: Random) -> None:
        self.storm.ask(draw_ask(rng, self.storm.shared_lens))
        self.storm.steps(5)

    @rule(index=indices)
    def abort(self, index: int) -> None:
        self.storm.abort([self.rid(index)])

    @rule(chosen=st.lists(indices, min_size=2, max_size=5))
    def abort_several(self, chosen: list[int]) -> None:
        self.storm.abort([*map(self.rid, chosen), "unknown"])

    @rule(index=indices)
    def abort_family(self, index: int) -> None:
        self.storm.abort_family(self.rid(index))

    @rule(max_steps=st.integers(1, 30))
    def abort_when_short(self, max_steps: int) -> None:
        self.storm.abort_when_short(max_steps)

    @rule(index=indices, num_back=st.integers(0, 6))
    def end_text(self, index: int, num_back: int) -> None:
        clients = self.storm.harness.clients
        answered = [rid for rid in self.storm.asked if clients[rid].output_ids]
        if answered:
            self.storm.end_text(answered[-1 - index % len(answered)], num_back)

    @rule(mode=st.sampled_from(PAUSE_MODES))
    def pause(self, mode: str) -> None:
        self.storm.pause(mode)

    @rule()
    def go_on(self) -> None:
        self.storm.go_on()

    @rule()
    def flush(self) -> None:
        self.storm.flush()

    @rule(seconds=st.sampled_from([1.0, 10.0, 30.0]))
    def advance(self, seconds: float) -> None:
        self.storm.advance(seconds)

    @rule(index=indices, what=st.sampled_from(["look", "explain", "ask again", "nonsense", "abort all and flush"]))
    def rare(self, index: int, what: str) -> None:
        if what == "look":
            self.storm.look()
        elif what == "explain":
            self.storm.explain(self.rid(index))
        elif what == "ask again":
            self.storm.ask_again(self.rid(index))
        elif what == "nonsense":
            self.storm.ask_nonsense(index % len(NONSENSE))
        else:
            self.storm.abort_all_and_flush()

    def teardown(self) -> None:
        if hasattr(self, "storm"):
            finish(self.storm)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=250, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
