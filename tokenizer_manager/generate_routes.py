"""SGLang's own route for work: /generate."""

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from aiohttp import web

from ..common.messages import unpack_int32
from ..common.text_messages import StrEnd
from .api_error import json_response
from .call import call_of
from .generate_protocol import GenerateBody
from .json_body import read_json
from .openai_format import failure
from .req_state import CLIENT_ABORT, Generation, Output, ReqState
from .sse import encode_event, stream_events
from .tokenizer_manager import GenerateReq, TokenizerManager

GENERATE = msgspec.json.Decoder(GenerateBody)


class GenerateRoutes:
    """Handlers over one tokenizer manager."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """POST /generate."""
        body = await read_json(request, GENERATE)
        call = call_of(request)
        if body.rid is None:
            body.rid = call.label
        prompts = body.prompts()
        self._manager.check_priority(body.priority)
        with self._manager.queue_place(call, len(prompts)):
            requests = await self._requests(body, prompts)
            if not isinstance(body.rid, list):
                call.label = body.rid
            elif body.is_single:
                call.label = requests[0].label
            return await self._answer(request, body, requests)

    async def _answer(
        self, request: web.Request, body: GenerateBody, requests: list[GenerateReq]
    ) -> web.StreamResponse:
        stream = bool(body.stream)
        with self._manager.generate(call_of(request), requests, stream=stream) as generation:
            answers = [GenerateAnswer(req) for req in generation.reqs]
            if stream:
                events = _events(generation, answers, is_single=body.is_single)
                return await stream_events(request, self._manager.metrics, events)
            while not generation.done:
                req, output = await generation.next()
                answers[req.index].add(output)
        whole = [answer.to_json() for answer in answers]
        return json_response(whole[0] if body.is_single else whole)

    async def _requests(self, body: GenerateBody, prompts: list[str | list[int]]) -> list[GenerateReq]:
        params = body.params(len(prompts), self._manager.vocab_size)
        labels = body.labels(len(prompts))
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
                cache_salt=body.cache_salt,
                priority=body.priority,
                routing_key=body.routing_key,
            )
            for index, input_ids in enumerate(sequences)
        ]


class GenerateAnswer:
    """What has come of one prompt, in SGLang's shape: text and ids are cumulative."""

    def __init__(self, req: ReqState) -> None:
        self._req = req
        self._text = bytearray()  # as JSON has it, without its quotes: what was sent is not encoded again
        self._output_ids = bytearray()  # as JSON has them, each with a comma before it
        self._num_outputs = 0
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

    def to_json(self) -> dict[str, Any]:
        """SGLang's object; what only the end knows is null or 0 before it."""
        end, req = self._end, self._req
        meta_info: dict[str, Any] = {
            "id": req.name,
            "finish_reason": end.finish_reason.to_json() if end else None,
            "prompt_tokens": end.stats.prompt_tokens if end else req.prompt_len,
            "completion_tokens": end.completion_tokens if end else self._num_outputs,
            "cached_tokens": end.stats.cached_tokens if end else 0,
            "num_retractions": end.stats.num_retractions if end else 0,
        }
        if end:
            meta_info["e2e_latency"] = req.ended_at - req.arrival
        text, output_ids = msgspec.Raw(b'"' + self._text + b'"'), msgspec.Raw(b"[" + self._output_ids[1:] + b"]")
        return {"text": text, "output_ids": output_ids, "meta_info": meta_info}


async def _events(
    generation: Generation, answers: list[GenerateAnswer], *, is_single: bool
) -> AsyncGenerator[bytes, None]:
    while not generation.done:
        req, output = await generation.next()
        answer = answers[req.index]
        answer.add(output)
        event = answer.to_json()
        yield encode_event(event if is_single else event | {"index": req.index})
