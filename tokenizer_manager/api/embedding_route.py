"""POST /v1/embeddings in OpenAI's shape."""

import asyncio
import base64
from array import array
from typing import Any

import msgspec
from aiohttp import web

from ..api_error import json_response
from ..call import call_of
from ..json_body import read_json
from ..tokenizer_manager import TokenizerManager
from .embedding_service import EmbeddingRequest, Embeddings, EmbeddingService

EMBEDDING = msgspec.json.Decoder(EmbeddingRequest)
VECTORS_AT_ONCE = 16  # that are encoded before the event loop goes on


class EmbeddingRoute:
    """The handler over one tokenizer manager."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager
        self._service = EmbeddingService(manager)

    async def embeddings(self, request: web.Request) -> web.Response:
        """POST /v1/embeddings."""
        body = await read_json(request, EMBEDDING)
        self._manager.check_model(body.model)
        found = await self._service.embed(call_of(request), body)
        usage = {"prompt_tokens": found.prompt_tokens, "total_tokens": found.prompt_tokens}
        return json_response(
            {
                "object": "list",
                "data": await _data(found, is_base64=body.encoding_format == "base64"),
                "model": body.model or self._manager.served_model_names[0],
                "usage": usage,
                "pooling": body.pooling,
            }
        )


async def _data(found: Embeddings, *, is_base64: bool) -> list[dict[str, Any]]:
    data = []
    for index, packed in enumerate(found.vectors):
        vector = (
            base64.b64encode(packed).decode()
            if is_base64
            else msgspec.Raw(msgspec.json.encode(array("f", packed).tolist()))
        )
        data.append({"object": "embedding", "index": index, "embedding": vector})
        if index % VECTORS_AT_ONCE == VECTORS_AT_ONCE - 1:
            await asyncio.sleep(0)
    return data
