"""The tokenizer manager: every request between its HTTP call and the scheduler.

It gives requests their ids, sends them, hands what comes back to the one waiter of each HTTP call, and knows whether
the server takes work: starting -> ready -> draining, or failed. It runs on the event loop, and nothing here waits for
another process except the calls that say so.
"""

import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import msgspec

from ..common.did_you_mean import did_you_mean
from ..common.finish_reason import FINISH_ABORT
from ..common.links import MANAGER, FromDetokenizer, FromScheduler, ToScheduler
from ..common.messages import (
    AbortReq,
    ContinueGenerationReqInput,
    ControlReqOutput,
    ExplainReqInput,
    ExplainReqOutput,
    FlushCacheReqInput,
    LoadSnapshot,
    PauseGenerationReqInput,
    TokenizedGenerateReqInput,
    pack_int32,
)
from ..common.sampling_params import MAX_SEED, SamplingParams
from ..common.text_messages import BatchStrOutput, StrOutput
from .access import Caller
from .accounting import count_end, observe_output
from .api.logprob_fields import Wanted, check_wanted
from .api.sampling_fields import SamplingBase
from .api_error import APIError, unsupported
from .call import Call
from .families import Family, GenerateReq, NamesInFlight, call_id_of, names_of, new_families
from .grammar.grammar_checker import GrammarChecker
from .grammar.grammar_messages import Grammar
from .metrics import Metrics
from .preparation import TimeLimits
from .queue_bounds import QueueBounds
from .req_state import Generation, ReqState
from .request_history import ReqRecord, RequestHistory, record_of
from .sampling_defaults import OPENAI
from .scheduler_calls import SchedulerCalls
from .server_status import ServerStatus, Status

MAX_QUEUED_REQUESTS = 2048

logger = logging.getLogger(__name__)


class TokenizerManager(ServerStatus):
    """Owns every request that has not ended, and the status of the server.

    `send` hands a message to the scheduler without blocking; `is_full` says that its link takes no more for now.
    """

    def __init__(
        self,
        *,
        served_model_names: Sequence[str],
        send: Callable[[ToScheduler], None],
        metrics: Metrics,
        is_full: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        random_seed: int | None = None,
        log_requests: bool = False,
        max_queued_requests: int = MAX_QUEUED_REQUESTS,
        max_queued_tokens: int | None = None,
        request_waiting_timeout: float = 0.0,
        request_timeout: float = 0.0,
        enable_priority_scheduling: bool = False,
        sampling_defaults: SamplingParams = OPENAI,
        incremental_streaming_output: bool = False,
    ) -> None:
        super().__init__(metrics, is_full, clock)
        self.served_model_names = tuple(served_model_names)
        self.incremental_streaming_output = incremental_streaming_output
        self._send = send
        self._log_requests = log_requests
        self._random = random.Random(random_seed)  # noqa: S311 - noise of sampling
        self._reqs: dict[str, tuple[ReqState, Generation]] = {}
        self._names = NamesInFlight()
        self._enable_priority_scheduling = enable_priority_scheduling
        self._sampling_defaults = sampling_defaults
        self._queue = QueueBounds(max_queued_requests, max_queued_tokens, metrics)
        self._time_limits = TimeLimits(request_waiting_timeout, request_timeout, metrics)
        self._calls = SchedulerCalls(send)
        self._history = RequestHistory()
        self.grammars = GrammarChecker(metrics)

    @property
    def num_inflight(self) -> int:
        """Requests at the scheduler whose final answer has not come."""
        return len(self._reqs)

    def running_reqs(self, caller: Caller) -> list[ReqState]:
        """Requests whose final answer has not come, oldest first: the caller's own, or all for the admin."""
        return [req for req, _ in self._reqs.values() if self._belongs_to(caller, req)]

    @property
    def sampling_base(self) -> SamplingBase:
        """What the sampling fields of a body are read against."""
        return SamplingBase(self.vocab_size, self._sampling_defaults, self.encoder.tokenizer)

    @property
    def _end_token_ids(self) -> tuple[int, ...]:
        """Those that can come: a tokenizer may have ids that the model has no logits for."""
        return tuple(each for each in self.encoder.tokenizer.eos_token_ids if each < self.vocab_size)

    # ---- from other processes ---------------------------------------------------------------------------------------

    def on_message(self, message: FromScheduler | FromDetokenizer) -> None:
        """Take a message of the scheduler or the detokenizer."""
        match message:
            case BatchStrOutput():
                now = self.clock()
                for output in message.outputs:
                    self._on_output(output, now)
            case ControlReqOutput() | ExplainReqOutput():
                self._calls.on_reply(message)
            case LoadSnapshot():
                self._queue.on_load(message, self.clock())
                self._on_status(message)
            case _:
                self._on_status(message)

    def fail_all(self, message: str) -> None:
        """The server can not go on: end every request with an error that says `message`, and refuse all work."""
        self.status = Status.FAILED
        self.failure = message
        for req, generation in list(self._reqs.values()):
            req.fail(message)
            self._finish(req, generation)
        self._calls.fail_all(message)

    def _on_output(self, output: StrOutput, now: float) -> None:
        found = self._reqs.get(output.rid)
        if found is None:
            if self.status is Status.FAILED:  # all have been told of that
                return
            logger.warning("request %s: an output came for a request that is not there", output.rid)
            return
        req, generation = found
        if not req.first_output:
            self._queue.on_output(req.rid)
        if output.token_ids:
            self._on_tokens(req, len(output.token_ids) // 4, now)
        req.put(output)
        if output.end is not None:
            self._finish(req, generation)
        else:
            generation.notify(req)

    def _on_tokens(self, req: ReqState, num_tokens: int, now: float) -> None:
        self.last_output = now
        req.first_output = req.first_output or now
        if req.stream:
            observe_output(self.metrics, req, num_tokens, now)

    def _finish(self, req: ReqState, generation: Generation) -> None:
        """The final answer of a request is here: forget it, count it, log it, tell its waiter."""
        assert req.end is not None
        reason = req.end.finish_reason
        if isinstance(reason, FINISH_ABORT) and reason.status_code in {429, 503}:
            req.retry_seconds = self._queue.on_refused()
        req.ended_at = self.clock()
        del self._reqs[req.rid]
        generation.num_running -= 1
        if not generation.num_running:
            self._free_names(generation)
        self._history.add(req)
        count_end(self.metrics, req, req.end, log=self._log_requests)
        generation.notify(req)

    def _free_names(self, generation: Generation) -> None:
        self._names.free(generation.tenant, generation.names)
        generation.names.clear()

    # ---- to the scheduler -------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def queue_place(self, call: Call, num_reqs: int) -> AsyncIterator[None]:
        """Around a call for so many requests, before anything is rendered or tokenized: APIError 429 if too many wait.

        The place counts until `generate` sends the requests, or until the context is left; so long the limits of time
        are kept here (503, 504).
        """
        self._queue.enter(call.request_id, num_reqs)
        try:
            async with self._time_limits.until_sent(call, self.clock()):
                yield
        finally:
            self._queue.leave(call.request_id)

    @contextmanager
    def generate(self, call: Call, requests: Sequence[GenerateReq], *, stream: bool) -> Iterator[Generation]:
        """Send the requests of one HTTP call; leaving the context aborts those that have not ended.

        The generation has n answers to each request. Raises APIError while no work is taken.
        """
        if self.status is not Status.DRAINING:  # what was accepted before draining began is served
            self.check_accepting()
        self._queue.check_tokens(call.request_id, sum(len(request.input_ids) for request in requests))
        wanted = [
            Wanted(each.logprobs, len(each.input_ids), each.sampling_params) for each in requests if each.logprobs
        ]
        check_wanted(wanted, self.vocab_size, self.context_len)
        families = new_families(call, requests, self.encoder.tokenizer.special_token_ids, stream=stream)
        generation = self._register(call, families)
        self._queue.leave(call.request_id)
        call.is_sent()
        try:
            for family in families:
                self._submit(call, family)
            yield generation
        finally:
            self._abandon(generation)

    def check_model(self, name: str | None) -> None:
        """Raise the 404 that names the served models, unless this is one of them or none is named."""
        if name is not None and name not in self.served_model_names:
            served = ", ".join(self.served_model_names)
            hint = did_you_mean(name[:100], self.served_model_names)
            message = f"The model {name[:100]!r} is not served here; served: {served}{hint}"
            raise APIError(404, message, param="model", code="model_not_found")

    def abort(self, name: str, caller: Caller) -> int:
        """End what has this name (a label, a rid, a response's id); returns how many requests were in flight.

        A caller that is not the admin ends only what its own tenant has sent, the admin what any tenant calls so.
        """
        found = self._names.find(name, caller) or [name]
        rids = [rid for rid in found if rid in self._reqs and self._belongs_to(caller, self._reqs[rid][0])]
        if rids:
            self._send(AbortReq(rids=rids))
        return len(rids)

    def _belongs_to(self, caller: Caller, req: ReqState) -> bool:
        return caller.is_admin or caller.tenant == req.tenant

    def abort_all(self) -> int:
        """End every request; returns how many there were."""
        rids = list(self._reqs)
        if rids:
            self._send(AbortReq(rids=rids))
        return len(rids)

    def check_priority(self, priority: int | None) -> None:
        """Raise the 400 for a priority that would do nothing here."""
        if priority and not self._enable_priority_scheduling:
            raise unsupported("priority", "priority needs a server with --enable-priority-scheduling; leave it out")

    # ---- questions to the scheduler: each waits for the answer, or raises APIError ---------------------------------

    async def compile_grammar(self, grammar: Grammar | None) -> str | None:
        """What GenerateReq.grammar is for a grammar of a request; APIError for a bad one."""
        return (await self.grammars.compile_all([grammar]))[0]

    async def flush_cache(self) -> ControlReqOutput:
        """Empty the prefix cache."""
        return await self._calls.ask(lambda asked: FlushCacheReqInput(asked, MANAGER), ControlReqOutput)

    async def pause_generation(self, mode: str) -> ControlReqOutput:
        """Plan no step until `continue_generation`; `mode` is one of PAUSE_MODES."""
        if mode == "abort":
            self.abort_all()
        return await self._calls.ask(lambda asked: PauseGenerationReqInput(asked, MANAGER, mode), ControlReqOutput)

    async def continue_generation(self) -> ControlReqOutput:
        """Go on after a pause."""
        return await self._calls.ask(lambda asked: ContinueGenerationReqInput(asked, MANAGER), ControlReqOutput)

    async def explain(self, rid: str) -> ExplainReqOutput:
        """What became of a request, by its rid."""
        return await self._calls.ask(lambda asked: ExplainReqInput(asked, MANAGER, rid), ExplainReqOutput)

    def find_requests(self, name: str) -> list[ReqRecord]:
        """The requests of one HTTP call, running or ended, that have this name: a label, a rid, a response's id.

        Several of a batch; of calls of a tenant that used one label after another those of the last.
        """
        names = {name, call_id_of(name)}
        records = [record_of(req) for req, _ in self._reqs.values() if not names.isdisjoint(req.names)]
        records += [record for each in names for record in self._history.find(each)]
        records.sort(key=lambda record: record.arrival)
        last_calls = {record.tenant: record.call_id for record in records}
        return [record for record in records if record.call_id == last_calls[record.tenant]]

    def _register(self, call: Call, families: list[Family]) -> Generation:
        """Take the names of a call; APIError if a client's id is in flight already."""
        rids_of = names_of(call, families)
        self._names.take(call.caller.tenant, rids_of)
        reqs = [req for family in families for req in family.reqs]
        generation = Generation(call.caller.tenant, reqs, rids_of)
        self._reqs.update({req.rid: (req, generation) for req in reqs})
        return generation

    def _submit(self, call: Call, family: Family) -> None:
        rid, request, reqs = family
        logger.debug("request %s: sent with %d prompt tokens", rid, reqs[0].prompt_len)
        for req in reqs:
            self._queue.on_sent(req.rid, req.prompt_len if req.counts_prompt else 0)
        self._send(
            TokenizedGenerateReqInput(
                rid=rid,
                frontend=MANAGER,
                arrival=call.arrival,
                input_ids=pack_int32(request.input_ids),
                sampling_params=self._complete(request.sampling_params, reqs[0].prompt_len),
                eos_token_ids=self._end_token_ids,
                stream=reqs[0].stream,
                traceparent=call.traceparent,
                priority=request.priority,
                cache_salt=call.caller.salted(request.cache_salt),
                routing_key=request.routing_key or call.routing_key,
                waiting_timeout=call.waiting_timeout,
                timeout=call.timeout,
                logprobs=request.logprobs,
                grammar=request.grammar,
                pooling=request.pooling,
            )
        )

    def _complete(self, params: SamplingParams, prompt_len: int) -> SamplingParams:
        """Clamp the output to what the context leaves, and draw a seed where there is none."""
        room = self.context_len - prompt_len
        return msgspec.structs.replace(
            params,
            max_new_tokens=room if params.max_new_tokens is None else min(room, params.max_new_tokens),
            min_new_tokens=min(room, params.min_new_tokens),
            seed=self._random.randint(0, MAX_SEED) if params.seed is None else params.seed,
        )

    def _abandon(self, generation: Generation) -> None:
        """Nobody waits any more. The final answers still come, and are counted."""
        left = [req for req in generation.reqs if req.rid in self._reqs]
        self._free_names(generation)
        if left:
            self._send(AbortReq(rids=[req.rid for req in left], message="The client closed the connection."))
