"""The real scheduler in virtual time: clients send a trace, a cost model stands in for the workers.

Time passes from event to event: a request reaches the scheduler, a result comes back, a time limit is due. As in
process.py, one turn of the scheduler's loop takes what has arrived, requests before results, and plans as many steps
as may be in flight; it takes its own time, and what comes meanwhile waits for the next turn. The worker runs one step
at a time: a step that was planned while another runs begins when that ends.
"""

import heapq
from collections import deque
from functools import partial
from typing import NamedTuple

from ...common.batch_messages import BatchResult
from ...common.messages import TokenizedGenerateReqInput
from ...common.sampling_params import SamplingParams
from ..scheduler import Scheduler
from .cost_model import CostModel, StepCosts
from .metrics import Measurements
from .simulated_worker import SimulatedWorker
from .workload import Trace

SNAPSHOT_TURNS = 4096  # the scheduler's observations are fetched so often


class SimulationError(RuntimeError):
    """The scheduler left requests unanswered; the message says how many."""


class Simulation:
    """One run of one trace. The scheduler is fresh, and its vocabulary one larger than the model's: that is EOS.

    `step_costs` replaces what the cost model says of steps.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        costs: CostModel,
        tp_size: int,
        trace: Trace,
        step_costs: StepCosts | None = None,
    ) -> None:
        config = scheduler.config
        self.now = 0.0
        self.scheduler = scheduler
        self.measurements = Measurements(len(trace.requests))
        self._times = costs.surroundings
        self._vocab_size = config.vocab_size - 1
        self._worker = SimulatedWorker(
            step_costs or StepCosts(costs, tp_size), trace.requests, config.max_running_requests, self._vocab_size
        )
        self._worker_free_at = 0.0
        self._scheduler_free_at = 0.0
        self._results: deque[tuple[float, BatchResult]] = deque()  # when the scheduler gets them
        self._clients = _Clients(trace, costs.surroundings.request_seconds)
        self._num_turns = 0

    def run(self) -> Measurements:
        """Until every request has ended; SimulationError if nothing happens any more and some have not."""
        while (event := self._next_event()) is not None:
            self.now = max(event, self._scheduler_free_at)
            self._scheduler_free_at = self.now + self._times.iteration_seconds
            self._receive()
            self._plan()
            self._send_output()
            self._num_turns += 1
            if self._num_turns % SNAPSHOT_TURNS == 0:
                self.measurements.on_snapshot(self.scheduler.take_snapshot(self.now))
        self.measurements.on_snapshot(self.scheduler.take_snapshot(self.now))
        if self.measurements.num_open:
            raise SimulationError(f"nothing happens any more, and {self.measurements.num_open} requests have no end")
        return self.measurements

    def _next_event(self) -> float | None:
        """When the scheduler's loop is woken next; None: never."""
        times = []
        if self._clients.arrivals:
            times.append(self._clients.arrivals[0].arrival)
        if self._results:
            times.append(self._results[0][0])
        deadline = self.scheduler.next_deadline()
        if deadline is not None and deadline > self.now:
            times.append(deadline)
        return min(times, default=None)

    def _receive(self) -> None:
        """Give the scheduler what has arrived by now; tokens leave as soon as their result is taken."""
        while self._clients.arrivals and self._clients.arrivals[0].arrival <= self.now:
            _, sent, index = heapq.heappop(self._clients.arrivals)
            self.measurements.sent[index] = sent
            self.scheduler.handle(self._message(index, sent), self.now)
        while self._results and self._results[0][0] <= self.now:
            result = self._results.popleft()[1]
            self.scheduler.process_batch_result(result, self.now)
            self._scheduler_free_at += self._times.iteration_row_seconds * (len(result.rows) // 4)
            self._send_output()

    def _plan(self) -> None:
        """Plan steps, and let the worker compute each when it has it and is free."""
        for batch in iter(partial(self.scheduler.get_next_batch_to_run, self.now), None):
            result = self._worker.run_step(batch)
            if result is None:
                continue
            start = max(self._scheduler_free_at + self._times.message_seconds, self._worker_free_at)
            end = start + result.step_seconds
            self._worker_free_at = end + self._times.gap_seconds
            self.measurements.worker_seconds += result.step_seconds
            self._results.append((end + self._times.message_seconds, result))

    def _send_output(self) -> None:
        output = self.scheduler.take_output()
        if output is not None:
            now = self._scheduler_free_at + self._times.output_seconds
            for index in self.measurements.on_output(output, now):
                self._clients.on_end(index, now)

    def _message(self, index: int, arrival: float) -> TokenizedGenerateReqInput:
        request = self._clients.requests[index]
        return TokenizedGenerateReqInput(
            rid=str(index),
            frontend="simulation",
            arrival=arrival,
            input_ids=request.input_ids(self._vocab_size),
            sampling_params=SamplingParams(
                max_new_tokens=request.max_new_tokens, ignore_eos=request.ignore_eos, temperature=0.0, seed=0
            ),
            eos_token_ids=(self._worker.eos_id,),
            stream=True,
            priority=request.priority,
            routing_key=request.routing_key,
        )


class _Arrival(NamedTuple):
    arrival: float  # at the scheduler
    sent: float  # by the client
    request: int


class _Clients:
    """Who sends what, and when. `arrivals` is a heap: what is on its way to the scheduler, or will be at a known time."""

    def __init__(self, trace: Trace, request_seconds: float) -> None:
        self.requests = trace.requests
        self.arrivals: list[_Arrival] = []
        self._request_seconds = request_seconds
        self._next_turn = {
            request.after: index for index, request in enumerate(trace.requests) if request.after is not None
        }
        firsts = [index for index, request in enumerate(trace.requests) if request.after is None]
        num_users = len(firsts) if trace.num_users is None else trace.num_users
        self._waiting = deque(firsts[num_users:])  # conversations that wait for a free user of the closed loop
        for index in firsts[:num_users]:
            self._send(index, self.requests[index].arrival or 0.0)

    def on_end(self, index: int, now: float) -> None:
        """A client has its answer: after a pause it sends the next turn, or the first of another conversation."""
        following = self._next_turn.get(index)
        if following is None and self._waiting:
            following = self._waiting.popleft()
        if following is not None:
            self._send(following, now + self.requests[following].think_seconds)

    def _send(self, index: int, sent: float) -> None:
        heapq.heappush(self.arrivals, _Arrival(sent + self._request_seconds, sent, index))
