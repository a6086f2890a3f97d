"""What waits for the scheduler and the detokenizer: requests, and the HTTP call that they belong to."""

import asyncio
from collections import deque
from collections.abc import Iterable

import msgspec

from ..common.finish_reason import FINISH_ABORT
from ..common.logprobs import LogprobBuffer, LogprobReq, TokenLogprobs
from ..common.messages import Int32s
from ..common.text_messages import RequestStats, StrEnd, StrOutput
from .api_error import RETRY_SECONDS
from .call import Call

CLIENT_ABORT = 499


class Output(msgspec.Struct):
    """What has come of a request since it was last asked."""

    text: str
    token_ids: Int32s
    end: StrEnd | None
    logprobs: TokenLogprobs | None = None  # of these tokens
    prompt_logprobs: TokenLogprobs | None = None  # with the first tokens, or the end

    @property
    def num_logprobs(self) -> int:
        """How many have come."""
        return sum(each.num_logprobs for each in (self.logprobs, self.prompt_logprobs) if each is not None)


class ReqState:
    """One request at the scheduler. Outputs pile up here while nobody takes them (a slow socket, say)."""

    def __init__(self, call: Call, rid: str, label: str | None, *, index: int, prompt_len: int, stream: bool) -> None:
        self.rid = rid
        self.label = label
        self.call_id = call.request_id
        self.tenant = call.caller.tenant
        self.names = frozenset(name for name in (rid, label, call.request_id, call.label) if name)
        self.index = index
        self.counts_prompt = True  # or another answer to the same prompt does
        self.prompt_len = prompt_len
        self.arrival = call.arrival
        self.stream = stream
        self.first_output = 0.0  # when the first tokens came; 0 before
        self.last_output = 0.0  # when the last output with tokens came; 0 before the first
        self.ended_at = 0.0
        self.num_outputs = 0  # tokens that have come
        self.end: StrEnd | None = None
        self.retry_seconds = RETRY_SECONDS  # when to come back, if it was refused
        self.has_news = False
        self.embedding = b""  # float32, where a vector was asked for
        self.wanted_logprobs: LogprobReq | None = None
        self.prompt_ids: list[int] = []  # kept where log-probabilities are wanted
        self.hidden_ids: frozenset[int] = frozenset()  # there too: the special tokens, if the text is without them
        self._text: list[str] = []
        self._token_ids: list[Int32s] = []
        self._logprobs = LogprobBuffer()
        self._prompt_logprobs: TokenLogprobs | None = None

    @property
    def name(self) -> str:
        """The id that clients see in bodies: their own, else ours."""
        return self.label or self.rid

    def put(self, output: StrOutput) -> None:
        """Add an output of the detokenizer."""
        self._text.append(output.text)
        self._token_ids.append(output.token_ids)
        self.num_outputs += len(output.token_ids) // 4
        self.end = output.end or self.end
        if output.logprobs is not None:
            self._logprobs.add(output.logprobs)
        self._prompt_logprobs = output.prompt_logprobs or self._prompt_logprobs
        self.embedding = output.embedding

    def fail(self, message: str) -> None:
        """End it here: the server can not go on."""
        self.end = StrEnd(
            finish_reason=FINISH_ABORT(message, 500, "engine_failed"),
            completion_tokens=0,
            stats=RequestStats(self.prompt_len, 0, 0),
        )

    def take(self) -> Output:
        """All that has come since the last call."""
        logprobs, prompt_logprobs = self._logprobs.take(), self._prompt_logprobs
        output = Output("".join(self._text), b"".join(self._token_ids), self.end, logprobs, prompt_logprobs)
        self._prompt_logprobs = None
        self._text.clear()
        self._token_ids.clear()
        self.has_news = False
        return output


class Generation:
    """The requests of one HTTP call, and its only waiter. `names` are the ids by which their tenant can abort them."""

    def __init__(self, tenant: str | None, reqs: list[ReqState], names: Iterable[str]) -> None:
        self.tenant = tenant
        self.reqs = reqs
        self.names = set(names)
        self.num_running = len(reqs)
        self._news: deque[ReqState] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._num_taken = 0

    @property
    def done(self) -> bool:
        """Whether the last output of every request has been taken."""
        return self._num_taken == len(self.reqs)

    def notify(self, req: ReqState) -> None:
        """There is something to take from `req`."""
        if not req.has_news:
            req.has_news = True
            self._news.append(req)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> tuple[ReqState, Output]:
        """Wait until any request has news; all that it has is taken at once."""
        while not self._news:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        req = self._news.popleft()
        output = req.take()
        self._num_taken += output.end is not None
        return req, output
