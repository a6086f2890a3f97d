"""Drives a Scheduler and a FakeWorker without processes, and keeps what a client would have got."""

from array import array
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from millstream.common.batch_messages import BatchResult, ScheduleBatch
from millstream.common.links import ControlReply, ToScheduler
from millstream.common.messages import AbortReq, TokenizedGenerateReqInput, pack_int32, unpack_int32
from millstream.common.sampling_params import SamplingParams
from millstream.common.text_messages import BatchTokenIDOutput, RequestEnd, StreamStart, TextEnded
from millstream.scheduler.fan_out import children_of
from millstream.scheduler.invariants import broken_invariants
from millstream.scheduler.req import Req
from millstream.scheduler.scheduler import Scheduler
from millstream.scheduler.scheduler_config import SchedulerConfig
from tests.scheduler.fake_worker import FakeWorker

VOCAB_SIZE = 50


@dataclass
class Client:
    """What the detokenizer got of one request."""

    starts: list[StreamStart] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    ends: list[RequestEnd] = field(default_factory=list)
    text_ends: int = 0
    cached_tokens: int = 0
    generation: int = 0
    embedding: bytes = b""
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[list[float]] = field(default_factory=list)


class Harness:
    """One scheduler with its worker. `step` plans and answers once; invariants are checked after each event, or fewer."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        max_running_requests: int = 8,
        context_len: int = 1000,
        failing_token_id: int | None = None,
        check_every: int = 1,
        **options: Any,
    ) -> None:
        config = SchedulerConfig(
            num_pages=num_pages,
            page_size=page_size,
            vocab_size=VOCAB_SIZE,
            context_len=context_len,
            max_running_requests=max_running_requests,
            **options,
        )
        self.scheduler = Scheduler(config)
        self.state = self.scheduler.state
        self.worker = FakeWorker(
            num_pages=num_pages,
            page_size=page_size,
            vocab_size=VOCAB_SIZE,
            max_running_requests=max_running_requests,
            failing_token_id=failing_token_id,
            context_len=context_len,
        )
        self.results: deque[BatchResult] = deque()  # computed, and not yet given to the scheduler
        self.batches: list[ScheduleBatch] = []
        self.clients: dict[str, Client] = {}
        self.replies: list[ControlReply] = []
        self.now = 0.0
        self.compiles = True  # False: grammars are ready when the test calls `compile`
        self._check_every = check_every
        self._num_events = 0
        self.seen: Counter[str] = Counter()  # rare situations, so that a test can tell that it met them

    def ask(
        self,
        rid: str,
        prompt: list[int],
        max_new_tokens: int | None = 8,
        *,
        eos: tuple[int, ...] = (),
        ignore_eos: bool = False,
        min_new_tokens: int = 0,
        stop_token_ids: tuple[int, ...] = (),
        temperature: float = 1.0,
        n: int = 1,
        cache_salt: str | None = None,
        arrival: float | None = None,
        priority: int | None = None,
        routing_key: str | None = None,
        waiting_timeout: float | None = None,
        timeout: float | None = None,
        **others: Any,
    ) -> Client:
        """Send a request; `others` are fields of the message."""
        params = SamplingParams(
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            temperature=temperature,
            seed=7,
            n=n,
        )
        self.now += 1
        message = TokenizedGenerateReqInput(
            rid=rid,
            frontend="http",
            arrival=self.now if arrival is None else arrival,
            input_ids=pack_int32(prompt),
            sampling_params=params,
            eos_token_ids=eos,
            cache_salt=cache_salt,
            priority=priority,
            routing_key=routing_key,
            waiting_timeout=waiting_timeout,
            timeout=timeout,
            **others,
        )
        return self.send(message)

    def send(self, message: TokenizedGenerateReqInput) -> Client:
        """Send a request as it is; the client of its first answer."""
        clients = [self.clients.setdefault(child.rid, Client()) for child in children_of(message)]
        self.scheduler.handle(message, self.now)
        self._collect()
        return clients[0]

    def abort(self, *rids: str) -> None:
        """The client went away."""
        self.scheduler.handle(AbortReq(list(rids)), self.now)
        self._collect()

    def end_text(self, rid: str, num_tokens: int) -> None:
        """The detokenizer found a stop string."""
        self.clients[rid].text_ends += 1
        self.scheduler.handle(TextEnded(rid, 0, num_tokens), self.now)
        self._collect()

    def control(self, message: ToScheduler) -> None:
        """Pause, continue, flush or explain."""
        self.scheduler.handle(message, self.now)
        self._collect()

    def plan(self) -> bool:
        """Plan one step and let the worker compute it; whether there was one."""
        state = self.state
        is_short = state.num_missing_pages() > 0
        batch = self.scheduler.get_next_batch_to_run(self.now)
        self.seen["sits out"] += is_short and bool(state.ending)
        self.seen["waits"] += any(req.waits_for for req in state.waiting_queue)
        self.seen["private"] += any(req.is_private for req in state.requests.values())
        self.seen["ending"] += bool(state.ending)
        if batch is not None:
            self.batches.append(batch)
            result = self.worker.run_step(batch)
            assert result is not None or batch.new_grammars, "the scheduler plans no empty step"
            if result is not None:
                self.results.append(result)
        self._collect()
        return batch is not None

    def answer(self) -> None:
        """Give the scheduler the oldest result."""
        self.scheduler.process_batch_result(self.results.popleft(), self.now)
        self._collect()

    def step(self) -> None:
        """Plan as far ahead as may be, then answer one step."""
        while self.plan():
            pass
        if self.compiles:
            self.compile()
        if self.results:
            self.answer()

    def compile(self) -> None:
        """Rank 0 has compiled the grammars that it was told of."""
        for message in self.worker.take_ready_grammars():
            self.scheduler.handle(message, self.now)
            self._collect()

    def req(self, rid: str) -> Req:
        """The scheduler's view of a request that has not ended."""
        return self.state.requests[rid]

    def run(self, max_steps: int = 3000) -> None:
        """Step until all requests have ended."""
        for _ in range(max_steps):
            if not self.state.requests:
                break
            self.step()
        assert not self.state.requests, "requests are stuck"
        assert not self.results

    def _collect(self) -> None:
        self._num_events += 1
        if self._num_events % self._check_every == 0:
            problems = broken_invariants(self.state)
            assert not problems, problems
        output = self.scheduler.take_output()
        if output is not None:
            self._read(output)
        self.replies += self.scheduler.take_replies()

    def _read(self, output: BatchTokenIDOutput) -> None:
        for start in output.starts:
            self.clients[start.rid].starts.append(start)
        token_ids = deque(unpack_int32(output.token_ids))
        columns = map(unpack_int32, (output.num_tokens, output.cached_tokens, output.generations))
        for rid, count, cached, generation in zip(output.rids, *columns, strict=True):
            client = self.clients[rid]
            assert client.starts, "tokens come after the start"
            assert not client.ends, "nothing comes after the end"
            assert not client.text_ends, "nothing comes after the text ended"
            client.output_ids += [token_ids.popleft() for _ in range(count)]
            client.cached_tokens, client.generation = cached, generation
        for rid, logprobs in output.logprobs.items():
            self.clients[rid].logprobs += array("f", logprobs.logprobs)
        for rid, logprobs in output.prompt_logprobs.items():
            self.clients[rid].prompt_logprobs.append(array("f", logprobs.logprobs).tolist())
        for rid, embedding in output.embeddings.items():
            self.clients[rid].embedding += embedding
        for end in output.ends:
            client = self.clients[end.rid]
            assert not client.text_ends
            assert end.num_tokens == len(client.output_ids)
            client.ends.append(end)
        for client in self.clients.values():
            assert len(client.starts) <= 1
            assert len(client.ends) <= 1
