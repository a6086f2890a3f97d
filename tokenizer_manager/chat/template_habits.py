"""What a model's chat template knows of tools, roles and reasoning, and messages made so that it takes them."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from .tool_prompt import show_tools, write_calls

TOOLS_VARIABLE = re.compile(r"\btools\b")
TOOL_CALLS_FIELD = re.compile(r"\btool_calls\b")
TEXT_ARGUMENTS = re.compile(r"\barguments['\"]?\]?\s*\+")  # the template joins them to other texts
THINKING_FIELD = re.compile(r"\bmessage\.thinking\b")
DEVELOPER_ROLE = re.compile(r"['\"]developer['\"]")
SHORT_ID_CHECK = re.compile(r"\.id\s*\|\s*length\s*!=\s*9")
SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


class TemplateHabits(msgspec.Struct, frozen=True):
    """Found in the template's text by `find_habits`."""

    takes_tools: bool = False  # it shows them to the model
    takes_tool_calls: bool = False  # and calls of earlier turns
    takes_text_arguments: bool = False  # of those calls; else objects
    takes_developer: bool = False
    takes_thinking: bool = False  # the name that gpt-oss's template has for reasoning
    takes_short_ids: bool = False  # of nine letters and digits alone, as Mistral's

    def messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """The messages, with all that the template does not know written out in others."""
        known = [self._message(message) for message in messages]
        if not self.takes_tool_calls:
            known = write_calls(known)
        return show_tools(known, tools) if tools and not self.takes_tools else known

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
        takes_tools=TOOLS_VARIABLE.search(text) is not None,
        takes_tool_calls=TOOL_CALLS_FIELD.search(text) is not None,
        takes_text_arguments=TEXT_ARGUMENTS.search(text) is not None,
        takes_developer=DEVELOPER_ROLE.search(text) is not None,
        takes_thinking=THINKING_FIELD.search(text) is not None,
        takes_short_ids=SHORT_ID_CHECK.search(text) is not None,
    )


def short_id(call_id: str) -> str:
    """The same for the same id, and for different ones as good as never."""
    return call_id if SHORT_ID.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]
