"""A second implementation of what stands behind the tokenizer manager, at the level of its messages.

It answers a request with its own prompt, token by token, over and over; a step gives every request one token. What a
scheduler and a detokenizer would say of ends, aborts, caches and load, it says too.
"""

import asyncio
import codecs
import re
from array import array
from collections.abc import Callable
from typing import Any

import msgspec

from millstream.common.finish_reason import (
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_MATCHED_STR,
    FINISH_MATCHED_TOKEN,
    FINISHED_MATCHED_REGEX,
    FinishReason,
)
from millstream.common.links import ControlReply, FromDetokenizer, FromScheduler, ToScheduler
from millstream.common.logprobs import TokenLogprobs
from millstream.common.messages import (
    POOLINGS,
    AbortReq,
    ContinueGenerationReqInput,
    ControlReqOutput,
    DetokenizerReady,
    ExplainedEvent,
    ExplainReqInput,
    ExplainReqOutput,
    FlushCacheReqInput,
    LoadProgress,
    LoadSnapshot,
    PauseGenerationReqInput,
    SchedulerReady,
    TokenizedGenerateReqInput,
    child_rid,
    pack_int32,
    unpack_int32,
)
from millstream.common.text_messages import BatchStrOutput, RequestStats, StrEnd, StrOutput
from millstream.common.tokenizer import Tokenizer


class EchoReq:
    """A request that runs."""

    def __init__(self, request: TokenizedGenerateReqInput) -> None:
        self.request = request
        self.prompt = unpack_int32(request.input_ids)
        self.token_ids: list[int] = []
        self.unsent_text = ""
        self.text = ""
        self.num_sent = 0
        self.has_answered = False
        self.utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")


class EchoBackend:
    """`send` is what the manager sends to; `receive` is the manager's `on_message`."""

    def __init__(self, tokenizer: Tokenizer, context_len: int, vocab_size: int) -> None:
        self.receive: Callable[[FromScheduler | FromDetokenizer], None] = lambda message: None
        self.context_len = context_len
        self.vocab_size = vocab_size
        self.received: list[ToScheduler] = []
        self.paused = False
        self.answers_control = True  # and aborts; otherwise they are taken and nothing comes of them
        self.takes_control = True  # whether a pause and its end succeed
        self.tokens_per_step = 1
        self.step_seconds = 0.0
        self.num_cached = 0
        self.refuse_with: FINISH_ABORT | None = None
        self.fail_after: int | None = None
        self.fail_with = FINISH_ABORT("the worker gave up", 500, "worker_error")
        self._tokenizer = tokenizer
        self._running: dict[str, EchoReq] = {}
        self._ended: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_running(self) -> int:
        """Requests that have not ended."""
        return len(self._running)

    @property
    def requests(self) -> list[TokenizedGenerateReqInput]:
        """Every request that came."""
        return [message for message in self.received if isinstance(message, TokenizedGenerateReqInput)]

    def prompt_texts(self) -> list[str]:
        """The prompt of every request that came."""
        return [self._tokenizer.decode(unpack_int32(request.input_ids), False) for request in self.requests]

    @property
    def aborts(self) -> list[AbortReq]:
        """Every abort that came."""
        return [message for message in self.received if isinstance(message, AbortReq)]

    def report_ready(self) -> None:
        """Start-up, as the processes tell it."""
        self.receive(LoadProgress(0, 50, 100))
        self.receive(SchedulerReady(64, 16, self.vocab_size, self.context_len, 8, 1000))
        self.receive(DetokenizerReady())

    def report_load(self, steps: int, *, hits: int = 0, retractions: int = 0, **others: Any) -> None:
        """A heartbeat with some figures."""
        load = LoadSnapshot(steps, 3, 2, 100, 50, 400, 0.5, 10 * hits, hits, retractions, 1, [0.01, 0.02], [0.001])
        self.receive(msgspec.structs.replace(load, **others))

    def send(self, message: ToScheduler) -> None:
        """Take a message of the manager."""
        self.received.append(message)
        if not self.answers_control and not isinstance(message, TokenizedGenerateReqInput):
            return
        match message:
            case TokenizedGenerateReqInput():
                num = message.sampling_params.n
                for rid in (child_rid(message.rid, index, num) for index in range(num)):
                    self._running[rid] = EchoReq(msgspec.structs.replace(message, rid=rid))
                self._step_later()
            case AbortReq():
                for rid in message.rids:
                    if rid in self._running:
                        abort = FINISH_ABORT(message.message, message.status_code, "")
                        asyncio.get_running_loop().call_soon(self._end, rid, abort)
            case FlushCacheReqInput():
                success = not self._running
                text = "flushed" if success else "requests are running"
                self._answer(ControlReqOutput(message.request_id, success, text))
            case PauseGenerationReqInput():
                self.paused = True
                self._answer(ControlReqOutput(message.request_id, self.takes_control, f"paused: {message.mode}"))
            case ContinueGenerationReqInput():
                self.resume()
                self._answer(ControlReqOutput(message.request_id, self.takes_control, "goes on"))
            case ExplainReqInput():
                self._answer(self._explanation(message))

    def step(self) -> None:
        """Give every running request its next tokens."""
        for rid in list(self._running):
            self._advance(rid)

    def resume(self) -> None:
        """Go on after a pause."""
        self.paused = False
        self._step_later()

    def _answer(self, reply: ControlReply) -> None:
        asyncio.get_running_loop().call_soon(self.receive, reply)

    def _explanation(self, message: ExplainReqInput) -> ExplainReqOutput:
        if message.rid in self._ended:
            status = "ended"
        elif message.rid in self._running:
            status = "running"
        else:
            return ExplainReqOutput(message.request_id, message.rid, None, [])
        queued = ExplainedEvent(0.001, 7, "queued", {"position": 1, "queue_tokens": 20, "policy": "fcfs"})
        return ExplainReqOutput(message.request_id, message.rid, status, [queued])

    def _step_later(self) -> None:
        if self._timer is None and not self.paused:
            self._timer = asyncio.get_running_loop().call_later(self.step_seconds, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if not self.paused:
            self.step()
            if self._running:
                self._step_later()

    def _advance(self, rid: str) -> None:
        req = self._running[rid]
        if self.refuse_with is not None:
            self._end(rid, self.refuse_with)
            return
        if req.request.pooling is not None:
            self._end(rid, FINISH_LENGTH(0), embedding_of(req))
            return
        reason: FinishReason | None = None
        if req.request.sampling_params.max_new_tokens == 0:
            self._end(rid, FINISH_LENGTH(0))
            return
        for _ in range(self.tokens_per_step):
            reason = reason or self._next_token(req)
        if self.fail_after is not None and len(req.token_ids) >= self.fail_after:
            reason = self.fail_with
        if reason is not None:
            self._end(rid, reason)
        elif req.request.stream:
            self.receive(BatchStrOutput([self._output(req)]))

    def _next_token(self, req: EchoReq) -> FinishReason | None:
        params = req.request.sampling_params
        token_id = req.prompt[len(req.token_ids) % len(req.prompt)]
        req.token_ids.append(token_id)
        is_eos = token_id in req.request.eos_token_ids and not params.ignore_eos
        if token_id in params.stop_token_ids or is_eos:
            return FINISH_MATCHED_TOKEN(token_id)
        piece = req.utf8.decode(self._tokenizer.decode_bytes([token_id]))  # nothing, while a character is incomplete
        req.text += piece
        req.unsent_text += piece
        for stop in params.stop:
            if stop in req.text:
                req.unsent_text = req.unsent_text.removesuffix(stop)
                return FINISH_MATCHED_STR(stop)
        for pattern in params.stop_regex:
            if found := re.search(pattern, req.text):
                req.unsent_text = req.unsent_text.removesuffix(found[0])
                return FINISHED_MATCHED_REGEX(pattern)
        if len(req.token_ids) == params.max_new_tokens:
            return FINISH_LENGTH(len(req.token_ids))
        return None

    def _output(self, req: EchoReq, end: StrEnd | None = None) -> StrOutput:
        text, new_ids = req.unsent_text, req.token_ids[req.num_sent :]
        req.unsent_text, req.num_sent = "", len(req.token_ids)
        start, prompt_logprobs = len(req.prompt) + len(req.token_ids) - len(new_ids), None
        if not req.has_answered:
            req.has_answered = True
            wanted = req.request.logprobs
            first = wanted.resolved(len(req.prompt)).start_len + 1 if wanted else 0
            prompt_logprobs = logprobs_of(req, first, req.prompt[first:])
        logprobs = logprobs_of(req, start, new_ids)
        return StrOutput(req.request.rid, text, pack_int32(new_ids), end, logprobs, prompt_logprobs)

    def _end(self, rid: str, reason: FinishReason, embedding: bytes = b"") -> None:
        req = self._running.pop(rid, None)
        if req is not None:
            self._ended.add(rid)
            stats = RequestStats(len(req.prompt), self.num_cached, 0)
            output = self._output(req, StrEnd(reason, len(req.token_ids), stats))
            self.receive(BatchStrOutput([msgspec.structs.replace(output, embedding=embedding)]))


def logprobs_of(req: EchoReq, start: int, token_ids: list[int]) -> TokenLogprobs | None:
    """Of tokens from position `start` on: -position; the likeliest are the tokens 65, 66 ... at 0, -1 ..."""
    wanted = req.request.logprobs
    if wanted is None or not token_ids:
        return None
    num, tops = len(token_ids), range(wanted.num_top)
    return TokenLogprobs(
        array("f", [-(start + i) for i in range(num)]).tobytes(),
        pack_int32([65 + i for i in tops] * num),
        array("f", [-float(i) for i in tops] * num).tobytes(),
        array("f", [-float(token_id) for token_id in wanted.token_ids] * num).tobytes(),
    )


def embedding_of(req: EchoReq) -> bytes:
    """A vector that tells which prompt and pooling it is of: its first token, its length, the number of the pooling."""
    return array("f", [req.prompt[0], len(req.prompt), POOLINGS.index(req.request.pooling or "")]).tobytes()
