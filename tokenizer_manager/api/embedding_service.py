"""Vectors of texts: hidden states of the served decoder, which is a language model and was not trained to embed.

Without HTTP: the route and Engine both answer with it.
"""

from typing import Any, Literal

import msgspec

from ...common.sampling_params import SamplingParams
from ..api_error import unsupported
from ..call import Call
from ..failure import failure
from ..families import GenerateReq
from ..json_body import CacheSalt, Int32, Label, check_unsupported
from ..req_state import Generation
from ..tokenizer_manager import TokenizerManager
from .openai_protocol import split_prompts

MAX_INPUTS = 2048
NO_OUTPUT = SamplingParams(max_new_tokens=0, temperature=0.0)
NEUTRAL: dict[str, tuple[Any, ...]] = {"messages": (), "truncate_prompt_tokens": ()}


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """POST /v1/embeddings. `pooling` is ours: the state of the last token, or the mean over all of them."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Int32 | None = None
    user: str | None = None
    pooling: Literal["last", "mean"] = "last"
    rid: Label | None = None
    priority: Int32 | None = None
    cache_salt: CacheSalt | None = None
    messages: Any = None
    truncate_prompt_tokens: Any = None

    def check(self) -> None:
        """APIError for what types alone do not catch."""
        if self.dimensions is not None:
            message = "dimensions is not supported: a vector is a hidden state, whose first part alone says little"
            raise unsupported("dimensions", message)
        check_unsupported(self, NEUTRAL)


class Embeddings(msgspec.Struct):
    """`vectors[i]` is that of input i: native float32 of the length 1."""

    vectors: list[bytes]
    prompt_tokens: int


class EmbeddingService:
    """Answers bodies over one tokenizer manager."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager

    async def embed(self, call: Call, body: EmbeddingRequest) -> Embeddings:
        """The vectors of all inputs; APIError if the body is refused or one of them fails."""
        body.check()
        manager = self._manager
        manager.check_priority(body.priority)
        inputs = split_prompts(body.input, "input", MAX_INPUTS)
        async with manager.queue_place(call, len(inputs)):
            sequences = await manager.encoder.prompt_ids(
                inputs, "input", vocab_size=manager.vocab_size, context_len=manager.context_len
            )
            call.label = body.rid or call.label
            requests = [
                GenerateReq(
                    input_ids=input_ids,
                    sampling_params=NO_OUTPUT,
                    label=f"{call.label}-{index}" if call.label and len(sequences) > 1 else call.label,
                    cache_salt=body.cache_salt,
                    priority=body.priority,
                    pooling=body.pooling,
                )
                for index, input_ids in enumerate(sequences)
            ]
            with manager.generate(call, requests, stream=False) as generation:
                return await _vectors(generation)


async def _vectors(generation: Generation) -> Embeddings:
    while not generation.done:
        req, output = await generation.next()
        error = failure(req, output.end)
        if error is not None:
            raise error
    return Embeddings([req.embedding for req in generation.reqs], sum(req.prompt_len for req in generation.reqs))
