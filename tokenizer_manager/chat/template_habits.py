"""What a model's chat template knows of tools, roles and reasoning, and messages made so that it takes them."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
import msgspec

from .tool_format import HERMES, ToolFormat
from .tool_prompt import show_tools, write_calls

NO_PARAMETERS = {"type": "object", "properties": {}}
TOOLS_VARIABLE = "tools"
TOOL_CALLS_FIELD = re.compile(r"\btool_calls\b")
CALLS_WITHOUT_CONTENT = re.compile(
    r"'assistant' and message\['content'\] is none"
)  # and none are shown beside an empty one
TEXT_ARGUMENTS = re.compile(  # the template joins them to other texts
    r"\barguments['\"]?\]?\s*\+|\+\s*[\w.\[\]'\"]*\barguments\b['\"]?\]?(?!\s*[|\]'\"])"
)
THINKING_FIELD = re.compile(r"\bmessage\.thinking\b")
DEVELOPER_ROLE = re.compile(r"['\"]developer['\"]")
NO_SYSTEM_ROLE = re.compile(r"raise_exception\(['\"]System role not supported")
ONE_CALL = re.compile(r"raise_exception\(['\"]This model only supports single tool-calls at once")
SHORT_ID_CHECK = re.compile(r"\.id\s*\|\s*length\s*(!=|<)\s*9")
SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


class TemplateHabits(msgspec.Struct, frozen=True):
    """Found in the template's text by `find_habits`."""

    takes_tools: bool = False  # it shows them to the model
    takes_tool_calls: bool = False  # and calls of earlier turns
    takes_text_arguments: bool = False  # of those calls; else objects
    takes_developer: bool = False
    takes_thinking: bool = False  # the name that gpt-oss's template has for reasoning
    takes_system: bool = True
    takes_parallel_calls: bool = True  # several in one message
    takes_short_ids: bool = False  # of nine letters and digits alone, as Mistral's

    def messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], layout: ToolFormat = HERMES
    ) -> list[dict[str, Any]]:
        """The messages, with all that the template does not know written out in others; calls as `layout` has them."""
        known = [self._message(message) for message in messages]
        if not self.takes_tool_calls:
            known = write_calls(known, layout)
        elif not self.takes_parallel_calls:
            known = list(one_call_each(known))
        if tools and not self.takes_tools:
            known = show_tools(known, [*map(_tool, tools)], layout)
        return known if self.takes_system else without_system(known)

    def tools(self, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The tools as the template gets them: none where it shows none, else all that it may read of them."""
        return [*map(_tool, tools)] if self.takes_tools else []

    def _message(self, given: Mapping[str, Any]) -> dict[str, Any]:
        message = dict(given)
        calls = message.get("tool_calls")
        if message["role"] == "developer" and not self.takes_developer:
            message["role"] = "system"
        if self.takes_thinking and "reasoning_content" in message and not (calls and message["content"]):
            message["thinking"] = message.pop("reasoning_content")
        if calls:
            message["tool_calls"] = [self._call(call) for call in calls]
        if self.takes_short_ids and "tool_call_id" in message:
            message["tool_call_id"] = short_id(message["tool_call_id"])
        return message

    def _call(self, given: Mapping[str, Any]) -> dict[str, Any]:
        call = {**given, "function": dict(given["function"])}
        arguments = call["function"]["arguments"]
        if self.takes_text_arguments and not isinstance(arguments, str):
            call["function"]["arguments"] = msgspec.json.encode(arguments).decode()
        if self.takes_short_ids:
            call["id"] = short_id(call["id"])
        return call


def find_habits(text: str) -> TemplateHabits:
    """What a template's text tells."""
    return TemplateHabits(
        takes_tools=TOOLS_VARIABLE in _names(text),
        takes_tool_calls=TOOL_CALLS_FIELD.search(text) is not None and not CALLS_WITHOUT_CONTENT.search(text),
        takes_text_arguments=TEXT_ARGUMENTS.search(text) is not None,
        takes_developer=DEVELOPER_ROLE.search(text) is not None,
        takes_thinking=THINKING_FIELD.search(text) is not None,
        takes_system=NO_SYSTEM_ROLE.search(text) is None,
        takes_parallel_calls=ONE_CALL.search(text) is None,
        takes_short_ids=SHORT_ID_CHECK.search(text) is not None,
    )


def _names(text: str) -> set[str]:
    """The names in a template's code; none where it is none."""
    try:
        return {value for _, kind, value in jinja2.Environment(autoescape=True).lex(text) if kind == "name"}
    except jinja2.TemplateSyntaxError:
        return set()


def without_system(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the system says, said by the user in the turn beside it, or in one of its own."""
    turns: list[dict[str, Any]] = []
    was_system = False
    for message in messages:
        is_system = message["role"] == "system"
        turn = {**message, "role": "user"} if is_system else dict(message)
        if (is_system or was_system) and turns and turns[-1]["role"] == turn["role"]:
            turns[-1]["content"] += f"\n\n{turn['content']}"
        else:
            turns.append(turn)
        was_system = is_system
    return turns


def one_call_each(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Of several calls in one message each in a message of its own, with its answer behind it."""
    answers: dict[str, dict[str, Any]] = {}
    for position, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        if message["role"] == "tool" and message["tool_call_id"] in answers:
            continue
        if len(calls) < 2:
            answers.clear()
            yield dict(message)
            continue
        answers = dict(_answers(messages[position + 1 :]))
        for index, call in enumerate(calls):
            yield {**message, "tool_calls": [call]} if index == 0 else _call_alone(call)
            if call["id"] in answers:
                yield answers[call["id"]]


def _answers(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tools' answers that these messages begin with, by the ids of their calls."""
    for message in messages:
        if message["role"] != "tool":
            return
        yield message["tool_call_id"], dict(message)


def _call_alone(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Templates read a description and parameters also where a client gave none, and nothing else."""
    function, known = tool["function"], {"name": "", "description": "", "parameters": NO_PARAMETERS}
    return {"type": "function", "function": {key: function.get(key) or known[key] for key in known}}


def short_id(call_id: str) -> str:
    """The same for the same id, and for different ones as good as never."""
    return call_id if SHORT_ID.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]
