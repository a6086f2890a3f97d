"""Reads a model's text as a family of models writes it: reasoning, content, tool calls."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from .delta import Delta
from .delta_writer import DeltaWriter, NewWriter
from .json_reader import JSONReader
from .text_reader import Malformed, Reading, TextReader

MAX_NAME_LEN = 256
ARGUMENT_KEYS = ("arguments", "parameters")


class Parse:
    """One text that is being read. `tools` maps the names of the client's functions to their parameters' schemas."""

    def __init__(self, tools: Mapping[str, Any], new_writer: NewWriter) -> None:
        self.reader = TextReader()
        self.writer = new_writer(lambda: self.reader.position)
        self.json = JSONReader(self.reader)
        self.tools = tools
        self.spans: list[tuple[int, int]] = []
        self._span_start: int | None = None
        self._is_recording = False

    def begin_reasoning(self, start: int | None = None) -> None:
        """What is taken from here on (or from the position `start`) is reasoning."""
        self._span_start = self.reader.position if start is None else start

    def end_reasoning(self) -> None:
        """The reasoning has ended here."""
        if self._span_start is not None:
            self.spans.append((self._span_start, self.reader.position))
            self._span_start = None

    def call(self, body: Reading[None]) -> Reading[bool]:
        """Read one tool call, tags and all. What is malformed comes out as content, unless it is a part of the call."""
        self.resume_recording()
        num_calls = self.writer.num_calls
        try:
            yield from body
            is_good = True
        except Malformed:
            is_good = False
        raw = self._recorded()
        is_cut_off = self.reader.ended and self.writer.num_calls > num_calls
        if is_cut_off:
            self.reader.take(self.reader.num_left)
        elif not is_good:
            self.writer.content(raw)
        return is_good

    def resume_recording(self) -> None:
        """What is taken from now on is content if the rest of the call is malformed."""
        self.reader.record()
        self._is_recording = True

    def begin_call(self, name: str) -> None:
        """A call is announced: it can not become content any more."""
        if not 0 < len(name) <= MAX_NAME_LEN:
            raise Malformed
        self._recorded()
        self.writer.begin_call(name)

    def object_call(self) -> Reading[None]:
        """A call as an object with `name`, and `arguments` or `parameters`."""
        reader, json = self.reader, self.json
        name, early, has_arguments = "", None, False
        yield from reader.expect("{")
        yield from reader.skip_space()
        while True:
            key = yield from self._collect(json.string)
            yield from json.colon(_ignore)
            if key == "name" and not name:
                name = yield from self._collect(json.value)
                if not isinstance(name, str):
                    raise Malformed
                if early is not None:
                    self._whole_call(name, early)
            elif key in ARGUMENT_KEYS and not has_arguments:
                has_arguments = True
                early = yield from self._arguments(name)
            else:
                yield from json.value(_ignore)
            if (yield from json.space(_ignore)) != ",":
                break
            reader.take(1)
            yield from reader.skip_space()
        yield from reader.expect("}")
        if not has_arguments or not name:
            self._whole_call(name, "{}" if not has_arguments else None)

    def named_arguments(self, name: str) -> Reading[None]:
        """The arguments of a call whose name has been read: an object."""
        yield from self.reader.skip_space()
        if (yield from self.reader.peek()) != "{":
            raise Malformed
        self.begin_call(name)
        yield from self.json.value(self.writer.arguments)
        self.resume_recording()

    def _arguments(self, name: str) -> Reading[str | None]:
        """The value under `arguments`: written as it comes, or returned where the name is still to come."""
        if name and (yield from self.reader.peek()) == "{":
            yield from self.named_arguments(name)
            return None
        pieces: list[str] = []
        yield from self.json.value(pieces.append)
        text = "".join(pieces)
        if text == "null":
            text = "{}"
        elif text.startswith('"'):  # some models write the object as a string
            text = _decode(text)
        if not name:
            return text
        self._whole_call(name, text)
        return None

    def _whole_call(self, name: str, arguments: str | None) -> None:
        if arguments is None:
            raise Malformed
        self.begin_call(name)
        self.writer.arguments(arguments)
        self.resume_recording()

    def _collect(self, read: Callable[[Callable[[str], None]], Reading[None]]) -> Reading[Any]:
        pieces: list[str] = []
        yield from read(pieces.append)
        return _decode("".join(pieces))

    def _recorded(self) -> str:
        was_recording, self._is_recording = self._is_recording, False
        return self.reader.recorded() if was_recording else ""


Program = Callable[[Parse], Reading[None]]


class ProgramParser:
    """An OutputParser that runs a program: a generator that takes from the reader and puts into the writer."""

    def __init__(
        self, program: Program, tools: Mapping[str, Any] | None = None, new_writer: NewWriter = DeltaWriter
    ) -> None:
        self._parse = Parse(tools or {}, new_writer)
        self._program = program(self._parse)
        self._is_running = True

    @property
    def reasoning_spans(self) -> Sequence[tuple[int, int]]:
        """See OutputParser."""
        return self._parse.spans

    def feed(self, text: str) -> list[Delta]:
        """See OutputParser."""
        self._parse.reader.push(text)
        return self._run()

    def finish(self) -> list[Delta]:
        """See OutputParser."""
        self._parse.reader.ended = True
        deltas = self._run()
        self._parse.end_reasoning()
        return deltas

    def _run(self) -> list[Delta]:
        if self._is_running:
            self._is_running = next(self._program, StopIteration) is not StopIteration
        return self._parse.writer.take()


def only_content(parse: Parse) -> Reading[None]:
    """All that is left is content."""
    yield from parse.reader.pass_until((), parse.writer.content)


def _decode(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.MsgspecError:  # a lone surrogate, say
        raise Malformed from None


def _ignore(text: str) -> None:
    """Drop what is read."""
