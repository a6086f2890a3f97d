"""The offline engine: the server's processes without HTTP, for programs and notebooks.

from millstream import Engine

with Engine("smollm2") as engine:
    print(engine.generate("The capital of France is", {"temperature": 0, "max_new_tokens": 8})["text"])
"""

import asyncio
import contextlib
import json
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from ..common.config import ServerArgs
from ..common.config_checks import check_args
from ..common.config_file import typed_value
from ..common.flags import ConfigError
from .api.embedding_service import EmbeddingRequest
from .api.generate_protocol import GenerateBody
from .children import Entries
from .engine_thread import EngineEnded, EngineStream, EngineThread
from .json_body import decode
from .served_model import find_served_model

BODY = msgspec.json.Decoder(GenerateBody)
EMBEDDING = msgspec.json.Decoder(EmbeddingRequest)

Prompt = str | Sequence[str]
Params = Mapping[str, Any] | Sequence[Mapping[str, Any]]


class Engine:
    """One model, ready to generate. A context; without one, `shutdown`, `del` or the program's end closes it.

    The arguments are the server's flags with underscores: `Engine("smollm2", tp_size=2, max_total_tokens=50_000)`.
    All methods may be called from any thread, several at a time, also where an event loop runs.
    """

    def __init__(self, model_path: str, *, entries: Entries | None = None, **arguments: Any) -> None:
        """Start the processes and wait until they are ready.

        ConfigError, ModelError: an argument or the model is wrong. ServerFailed: the processes could not start.
        `entries` replaces the functions that the child processes run.
        """
        unknown = [name for name in arguments if name not in ServerArgs.__struct_fields__]
        if unknown:
            raise ConfigError(f"Engine has no argument {unknown[0]}: its arguments are the server's flags")
        given = {
            name: typed_value(f"Engine's {name}", name, value) for name, value in arguments.items() if value is not None
        }
        args = check_args(ServerArgs(**{"model_path": model_path, "log_level": "warning"} | given))
        self._thread = EngineThread(find_served_model(args), entries or Entries())
        self._finalizer = weakref.finalize(self, self._thread.shut_down)  # also at the interpreter's end
        try:
            self._thread.start_up()
        except BaseException:
            self.shutdown()
            raise

    def generate(
        self,
        prompt: Prompt | None = None,
        sampling_params: Params | None = None,
        *,
        input_ids: Sequence[Any] | None = None,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """What POST /generate answers: one object of a single prompt, a list of several; with `stream` an iterator.

        `fields` are others of its body. APIError where a request is refused or fails, naming the field; EngineEnded
        after the end. Closing the iterator aborts what has not ended.
        """
        body = _body(prompt, sampling_params, input_ids, stream, fields)
        if stream:
            return self._iterate(self._thread.stream(body))
        return self._wait(self._thread.whole(body))

    async def async_generate(
        self,
        prompt: Prompt | None = None,
        sampling_params: Params | None = None,
        *,
        input_ids: Sequence[Any] | None = None,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """As `generate`, for coroutines; with `stream` an asynchronous iterator. Cancelling it aborts the requests."""
        body = _body(prompt, sampling_params, input_ids, stream, fields)
        if stream:
            return self._iterate_async(self._thread.stream(body))
        return await asyncio.wrap_future(self._thread.submit(self._thread.whole(body)))

    def encode(self, prompt: Prompt, *, pooling: str = "last") -> list[float] | list[list[float]]:
        """The vector of a prompt, or of each of several, as POST /v1/embeddings: hidden states of the served decoder."""
        vectors: list[list[float]] = self._wait(self._thread.embed(_embedding_body(prompt, pooling)))
        return vectors[0] if isinstance(prompt, str) else vectors

    async def async_encode(self, prompt: Prompt, *, pooling: str = "last") -> list[float] | list[list[float]]:
        """As `encode`, for coroutines."""
        vectors = await asyncio.wrap_future(self._thread.submit(self._thread.embed(_embedding_body(prompt, pooling))))
        return vectors[0] if isinstance(prompt, str) else vectors

    def shutdown(self) -> None:
        """End all processes; again does nothing."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _iterate(self, stream: EngineStream) -> Iterator[dict[str, Any]]:
        try:
            while (event := self._wait(stream.next())) is not None:
                yield event
        finally:
            self._close(stream)

    async def _iterate_async(self, stream: EngineStream) -> AsyncIterator[dict[str, Any]]:
        try:
            while (event := await asyncio.wrap_future(self._thread.submit(stream.next()))) is not None:
                yield event
        finally:
            self._close(stream)

    def _close(self, stream: EngineStream) -> None:
        """Abort what a stream still does. It waits for nothing: the collector may call it in any thread, the loop's too."""
        with contextlib.suppress(EngineEnded):
            self._thread.submit(stream.close())

    def _wait(self, coroutine: Any) -> Any:
        future = self._thread.submit(coroutine)
        try:
            return future.result()
        except BaseException:  # Ctrl-C, say: nobody waits any more
            future.cancel()
            raise


def _embedding_body(prompt: Prompt, pooling: str) -> EmbeddingRequest:
    """The body of a POST /v1/embeddings, checked as one."""
    return decode(_json({"input": prompt, "pooling": pooling}), EMBEDDING)


def _body(
    prompt: Prompt | None, sampling_params: Params | None, input_ids: Any, stream: bool, fields: dict[str, Any]
) -> GenerateBody:
    """The body of a POST /generate, checked as one."""
    unknown = [name for name in fields if name not in GenerateBody.__struct_fields__]
    if unknown:
        raise TypeError(f"generate() has no argument {unknown[0]!r}")
    given = {"text": prompt, "sampling_params": sampling_params, "input_ids": input_ids, "stream": stream}
    body = {name: value for name, value in (given | fields).items() if value is not None}
    return decode(_json(body), BODY)


def _json(body: dict[str, Any]) -> bytes:
    """As a client would write it; TypeError or ValueError for what JSON does not have, such as bytes and infinity."""
    return json.dumps(body, allow_nan=False).encode()
