"""What goes to the detokenizer: starts, tokens and ends, gathered until they are taken as one message."""

from collections.abc import Iterable, Sequence

from ..common.finish_reason import FINISH_ABORT, FinishReason
from ..common.logprobs import LogprobBuffer, TokenLogprobs
from ..common.messages import TokenizedGenerateReqInput, pack_int32
from ..common.text_messages import NUM_CONTEXT_TOKENS, BatchTokenIDOutput, RequestEnd, RequestStats, StreamStart
from .req import Req

NOT_COMPUTED = RequestStats(prompt_tokens=0, cached_tokens=0, num_retractions=0)
ERR_TYPES = {
    400: "BadRequestError",
    429: "QueueFull",
    499: "RequestAborted",
    500: "InternalServerError",
    503: "QueueTimeout",
    504: "RequestTimeout",
}
OUT_OF_MEMORY = "OutOfMemory"


def abort_reason(message: str, status_code: int, err_type: str | None = None) -> FINISH_ABORT:
    """The end of a request that was refused, aborted or failed; the status says the `err_type` unless it is given."""
    return FINISH_ABORT(message, status_code, err_type or ERR_TYPES.get(status_code, "InternalServerError"))


class TokenOutput:
    """Gathers one BatchTokenIDOutput."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._starts: list[StreamStart] = []
        self._rids: list[str] = []
        self._generations: list[int] = []
        self._cached_tokens: list[int] = []
        self._num_tokens: list[int] = []
        self._token_ids: list[int] = []
        self._ends: list[RequestEnd] = []
        self._logprobs: dict[str, LogprobBuffer] = {}
        self._prompt_logprobs: dict[str, TokenLogprobs] = {}
        self._embeddings: dict[str, bytes] = {}

    def add_start(self, req: Req) -> None:
        """The request's first tokens, or its end, follow."""
        if not req.has_started:
            req.has_started = True
            context = req.key(max(0, req.prompt_len - NUM_CONTEXT_TOKENS), req.prompt_len)
            self._starts.append(_stream_start(req.message, req.prompt_len, context))

    def add_tokens(self, reqs: Sequence[Req], counts: Iterable[int], token_ids: Iterable[int]) -> None:
        """New outputs: `counts[i]` ids of the flat `token_ids` for `reqs[i]`, which has started."""
        self._rids += [req.rid for req in reqs]
        self._generations += [req.num_retractions for req in reqs]
        self._cached_tokens += [req.cached_tokens for req in reqs]
        self._num_tokens += counts
        self._token_ids += token_ids

    def add_logprobs(self, req: Req, logprobs: TokenLogprobs) -> None:
        """Of the outputs that are added with it."""
        self._logprobs.setdefault(req.rid, LogprobBuffer()).add(logprobs)

    def add_prompt_logprobs(self, req: Req) -> None:
        """Those that have gathered while its prompt was computed, if any."""
        logprobs = req.prompt_logprobs.take()
        if logprobs is not None:
            self._prompt_logprobs[req.rid] = logprobs

    def add_embedding(self, req: Req, embedding: bytes) -> None:
        """The vector of its prompt."""
        self._embeddings[req.rid] = embedding

    def add_end(self, req: Req, reason: FinishReason) -> None:
        """The request ends after the outputs that it has."""
        self.add_start(req)
        stats = RequestStats(req.prompt_len, req.cached_tokens, req.num_retractions)
        self._ends.append(RequestEnd(req.rid, reason, req.num_outputs, stats))

    def add_refusal(self, message: TokenizedGenerateReqInput, reason: FINISH_ABORT) -> None:
        """A request that never became one: it starts and ends at once."""
        self._starts.append(_stream_start(message, len(message.input_ids) // 4, b""))
        self._ends.append(RequestEnd(message.rid, reason, 0, NOT_COMPUTED))

    def take(self) -> BatchTokenIDOutput | None:
        """What has gathered since the last call, if anything."""
        if not (self._rids or self._ends):
            return None
        output = BatchTokenIDOutput(
            starts=self._starts,
            rids=self._rids,
            generations=pack_int32(self._generations),
            cached_tokens=pack_int32(self._cached_tokens),
            num_tokens=pack_int32(self._num_tokens),
            token_ids=pack_int32(self._token_ids),
            ends=self._ends,
            logprobs={rid: taken for rid, buffer in self._logprobs.items() if (taken := buffer.take())},
            prompt_logprobs=self._prompt_logprobs,
            embeddings=self._embeddings,
        )
        self._clear()
        return output


def _stream_start(message: TokenizedGenerateReqInput, prompt_len: int, context_ids: bytes) -> StreamStart:
    params = message.sampling_params
    return StreamStart(
        rid=message.rid,
        frontend=message.frontend,
        stream=message.stream,
        prompt_len=prompt_len,
        context_ids=context_ids,
        min_new_tokens=params.min_new_tokens,
        stop=params.stop,
        skip_special_tokens=params.skip_special_tokens,
        no_stop_trim=params.no_stop_trim,
        stop_regex=params.stop_regex,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )
