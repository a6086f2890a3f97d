"""Reads answers by the response template that a tokenizer brings, with transformers' own parser (which loads no torch).

Import this at start-up alone: it takes seconds. A tool call comes whole, when it ends. Where the template's parser gives
up on one, it and all that follows are content.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from ...common.flags import ConfigError
from .delta import Delta
from .delta_writer import NewWriter

REASONING_FIELDS = frozenset({"reasoning_content", "reasoning", "thinking"})
CALLS_FIELD = "tool_calls"
MAX_SPACE_RUN = 256  # characters: a template's patterns may look at each of them again and again
LONG_SPACE = re.compile(rf"(\s{{{MAX_SPACE_RUN}}})\s+")
RUN = re.compile(r"[\w\s]*[^\w\s]?")  # delimiters end with a sign: no run ends a call and brings something behind it


def compile_response_template(spec: Mapping[str, Any]) -> ResponseTemplate:
    """Check and compile a tokenizer's response template; ConfigError where it is none."""
    try:
        return load_response_template(dict(spec))
    except Exception as error:  # patterns of all kinds
        raise ConfigError(f"the tokenizer's response_template: {error}") from error


class ResponseTemplateParser:
    """An OutputParser. `prompt` may have begun the answer; `tools` are as chat templates read them.

    Without tools calls are content, and so is reasoning unless it is to be separated from it.
    """

    def __init__(
        self,
        template: ResponseTemplate,
        prompt: str,
        tools: Sequence[Mapping[str, Any]],
        new_writer: NewWriter,
        separates: bool,
    ) -> None:
        self._writer = new_writer(lambda: self._settled - len(self._space or ""))
        self._has_tools = bool(tools)
        self._separates = separates
        self._parser: ResponseParser | None = None
        self._field: str | None = None
        self._raw: list[str] = []  # of a call that has not ended
        self._space: str | None = None  # held back; None at the beginning of a region
        self._position = 0
        self._settled = 0  # the position behind what events have told of
        self._spans: list[tuple[int, int]] = []
        self._span_start = 0
        try:
            self._parser = ResponseParser(template, prefix=prompt, tools=[dict(tool) for tool in tools])
            for event in self._parser.initial_events:
                self._field = event["field"] if event["type"] == "region_open" else self._field
                self._field = None if event["type"] == "region_close" else self._field
        except ValueError:  # the prompt has a call that can not be read
            self._parser = None

    @property
    def reasoning_spans(self) -> Sequence[tuple[int, int]]:
        """See OutputParser."""
        return self._spans

    def feed(self, text: str) -> list[Delta]:
        """See OutputParser."""
        for run in RUN.findall(text):
            self._feed_run(run)
        return self._writer.take()

    def finish(self) -> list[Delta]:
        """See OutputParser."""
        if self._parser is not None:
            try:
                self._on_events(self._parser.finalize()[1])
            except (ValueError, KeyError, TypeError):
                self._give_up("")
        if self._field in REASONING_FIELDS:
            self._spans.append((self._span_start, self._position))
        return self._writer.take()

    def _feed_run(self, run: str) -> None:
        self._position += len(run)
        if self._parser is None:
            self._settled = self._position
            self._writer.content(run)
            return
        num_read, run = len(run), LONG_SPACE.sub(r"\1", run)
        self._settled += num_read - len(run)
        was_in_call = self._field == CALLS_FIELD
        if was_in_call:
            self._raw.append(run)
        try:
            events = self._parser.feed(run)
            self._on_events(events)
            if not was_in_call and self._field == CALLS_FIELD and events[-1]["type"] == "region_chunk":
                self._raw.append(run)
        except (ValueError, KeyError, TypeError):
            self._give_up("" if self._raw else run)

    def _give_up(self, run: str) -> None:
        self._parser = None
        self._settled, self._space = self._position, None
        self._writer.content("".join(self._raw) + run)

    def _on_events(self, events: Sequence[Mapping[str, Any]]) -> None:
        start = self._settled
        for event in events:
            if event["type"] == "region_open":
                self._open(event["field"], start)
            elif event["type"] == "region_chunk":
                self._settled = min(self._settled + len(event["text"]), self._position)
                self._add(event["text"])
            else:
                self._settled = self._position
                self._close(event["value"])
        if events and events[-1]["type"] == "region_open":  # by a tag, which ends here
            self._settled = self._position

    def _open(self, field: str, start: int) -> None:
        self._field, self._space = field, None
        self._raw.clear()
        self._span_start = start

    def _add(self, text: str) -> None:
        if self._field == CALLS_FIELD:
            return
        text = text.lstrip() if self._space is None else self._space + text
        kept = text.rstrip()
        if kept or self._space is not None:
            self._space = text[len(kept) :]
        write = self._writer.reasoning if self._field in REASONING_FIELDS and self._separates else self._writer.content
        write(kept)

    def _close(self, value: Any) -> None:
        if self._field == CALLS_FIELD and not self._has_tools:
            self._writer.content("".join(self._raw))
        elif self._field == CALLS_FIELD:
            for call in value if isinstance(value, list) else [value]:
                self._call(call["function"])
        elif self._field in REASONING_FIELDS:
            self._spans.append((self._span_start, self._position))
        self._field = None
        self._raw.clear()

    def _call(self, function: Mapping[str, Any]) -> None:
        name, arguments = function["name"], function.get("arguments") or {}
        if not isinstance(name, str):
            raise TypeError
        self._writer.begin_call(name)
        self._writer.arguments(arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode())
