"""SGLang's generation without HTTP: from a body to answers in SGLang's shape. /generate and Engine both answer with it."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from ...common.messages import unpack_int32
from ...common.sampling_params import SamplingParams
from ...common.text_messages import StrEnd
from ...common.tokenizer import Tokenizer
from ..call import Call
from ..failure import failure
from ..families import GenerateReq
from ..json_body import salt_of
from ..req_state import CLIENT_ABORT, Generation, Output, ReqState
from ..tokenizer_manager import TokenizerManager
from .generate_protocol import GenerateBody
from .logprob_format import MANY_LOGPROBS, GenerateLogprobs

LONG_BYTES = 64 * 1024  # events that hold all so far, and so many bytes, go out when there is more by
LONG_SHARE = 32  # one part in so many
INLINE_PARAMS = 8  # parts of a batch whose sampling parameters are checked at once; those of more in a thread


class GenerateService:
    """Answers bodies over one tokenizer manager."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager

    @asynccontextmanager
    async def start(self, call: Call, body: GenerateBody) -> AsyncIterator["GenerateAnswers"]:
        """Check, tokenize and send; leaving the context aborts what has not ended. APIError if it is refused."""
        if body.rid is None:
            body.rid = call.label
        prompts = body.prompts()
        self._manager.check_priority(body.priority)
        params = await self._params(body, len(prompts))
        async with self._manager.queue_place(call, sum(each.n for each in params)):
            requests = await self._requests(body, prompts, params)
            if not isinstance(body.rid, list):
                call.label = body.rid
            elif body.is_single:
                call.label = requests[0].label
            with self._manager.generate(call, requests, stream=bool(body.stream)) as generation:
                yield GenerateAnswers(
                    generation,
                    body,
                    self._manager.encoder.tokenizer,
                    is_incremental=self._manager.incremental_streaming_output,
                )

    async def _params(self, body: GenerateBody, num_prompts: int) -> list[SamplingParams]:
        base = self._manager.sampling_base
        if isinstance(body.sampling_params, list) and num_prompts > INLINE_PARAMS:
            return await asyncio.to_thread(body.params, num_prompts, base)
        return body.params(num_prompts, base)

    async def _requests(
        self, body: GenerateBody, prompts: list[str | list[int]], params: list[SamplingParams]
    ) -> list[GenerateReq]:
        grammars = await self._manager.grammars.compile_all(body.grammars(len(prompts)))
        labels, cache_salt = body.labels(len(prompts)), salt_of(body.cache_salt, body.extra_key)
        logprobs = body.logprobs(len(prompts))
        sequences = await self._manager.encoder.prompt_ids(
            prompts,
            "input_ids" if body.text is None else "text",
            vocab_size=self._manager.vocab_size,
            context_len=self._manager.context_len,
        )
        return [
            GenerateReq(
                input_ids=input_ids,
                sampling_params=params[index],
                label=labels[index],
                cache_salt=cache_salt,
                priority=body.priority,
                routing_key=body.routing_key,
                logprobs=logprobs[index],
                grammar=grammars[index],
            )
            for index, input_ids in enumerate(sequences)
        ]


class GenerateAnswers:
    """The answers to one body while they come. `is_incremental`: an event brings what is new, not all so far."""

    def __init__(
        self, generation: Generation, body: GenerateBody, tokenizer: Tokenizer, *, is_incremental: bool
    ) -> None:
        self._generation = generation
        with_texts = bool(body.return_text_in_logprobs)
        self._answers = [GenerateAnswer(req, tokenizer, with_texts=with_texts) for req in generation.reqs]
        self._is_incremental = is_incremental
        self._is_single = body.is_single and len(generation.reqs) == 1

    async def whole(self) -> Any:
        """Wait for the end: one object, or a list of a batch or of several answers."""
        while not self._generation.done:
            await self._next()
        whole = [answer.to_json() for answer in self._answers]
        return whole[0] if self._is_single else whole

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """An object whenever enough has come, with the index of its prompt in a batch."""
        while not self._generation.done:
            req = await self._next()
            answer = self._answers[req.index]
            if not answer.is_due:
                continue
            event = answer.to_json()
            if self._is_incremental:
                answer.clear()
            yield event if self._is_single else event | {"index": req.index}

    async def _next(self) -> ReqState:
        req, output = await self._generation.next()
        answer = self._answers[req.index]
        if output.num_logprobs > MANY_LOGPROBS:
            await asyncio.to_thread(answer.add_logprobs, output)
        else:
            answer.add_logprobs(output)
        answer.add(output)
        return req


class GenerateAnswer:
    """What has come of one prompt since `clear`, in SGLang's shape."""

    def __init__(self, req: ReqState, tokenizer: Tokenizer, *, with_texts: bool) -> None:
        self._req = req
        wanted = req.wanted_logprobs
        self._logprobs = (
            None if wanted is None else GenerateLogprobs(tokenizer, wanted, req.prompt_ids, with_texts=with_texts)
        )
        self._text = bytearray()  # as JSON has it, without its quotes: what was sent is not encoded again
        self._output_ids = bytearray()  # as JSON has them, each with a comma before it
        self._num_outputs = 0
        self._num_handed_out = 0  # bytes
        self._end: StrEnd | None = None

    def add(self, output: Output) -> None:
        """Take an output; APIError where the request failed (a request that was aborted keeps what it has)."""
        self._text += msgspec.json.encode(output.text)[1:-1]
        new_ids = unpack_int32(output.token_ids)
        self._output_ids += b"".join([b",%d" % token_id for token_id in new_ids])
        self._num_outputs += len(new_ids)
        self._end = output.end
        error = failure(self._req, output.end)
        if error is not None and error.status != CLIENT_ABORT:
            raise error

    def add_logprobs(self, output: Output) -> None:
        """Take those of an output."""
        if self._logprobs is not None:
            self._logprobs.add(unpack_int32(output.token_ids), output.logprobs, output.prompt_logprobs)

    @property
    def is_due(self) -> bool:
        """Whether an event shall go out: always while it is short or at the end, else when it has grown by a share.

        So all the events of a stream together are a bounded number of times as long as the last one.
        """
        size = self._num_bytes
        return self._end is not None or size < LONG_BYTES or size >= self._num_handed_out * (1 + 1 / LONG_SHARE)

    def clear(self) -> None:
        """Forget what has been handed out."""
        self._text.clear()
        self._output_ids.clear()
        self._num_handed_out = 0
        if self._logprobs is not None:
            self._logprobs.clear()

    @property
    def _num_bytes(self) -> int:
        num_logprob_bytes = 0 if self._logprobs is None else self._logprobs.num_bytes
        return len(self._text) + len(self._output_ids) + num_logprob_bytes

    def to_json(self) -> dict[str, Any]:
        """SGLang's object; what only the end knows is null or 0 before it."""
        self._num_handed_out = self._num_bytes
        end, req = self._end, self._req
        meta_info: dict[str, Any] = {
            "id": req.name,
            "finish_reason": end.finish_reason.to_json() if end else None,
            "prompt_tokens": end.stats.prompt_tokens if end else req.prompt_len,
            "completion_tokens": end.completion_tokens if end else self._num_outputs,
            "cached_tokens": end.stats.cached_tokens if end else 0,
            "num_retractions": end.stats.num_retractions if end else 0,
        }
        if self._logprobs is not None:
            meta_info |= self._logprobs.to_json()
        if end:
            meta_info["e2e_latency"] = req.ended_at - req.arrival
        text, output_ids = msgspec.Raw(b'"' + self._text + b'"'), msgspec.Raw(b"[" + self._output_ids[1:] + b"]")
        return {"text": text, "output_ids": output_ids, "meta_info": meta_info}
