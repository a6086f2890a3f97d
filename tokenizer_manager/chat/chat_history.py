"""A chat from APIs that write it as blocks or items, as chat templates read it: messages in OpenAI's chat form."""

from typing import Any

SYSTEM_ROLES = frozenset({"system", "developer"})
TEXT_KEYS = ("content", "reasoning_content")


class ChatHistory:
    """Takes the pieces of a chat in order. What templates want as one message becomes one: system texts at the head,
    and neighbouring texts, reasoning and tool calls of one role.
    """

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []  # texts still in pieces
        self._function_names: dict[str, str] = {}  # call id -> name

    def add_text(self, role: str, text: str) -> None:
        """Some text of the system, the user or the assistant."""
        role = "system" if role in SYSTEM_ROLES else role
        if self._is_open(role) and "tool_calls" not in self._messages[-1]:
            self._messages[-1]["content"].append(text)
        else:
            self._messages.append({"role": role, "content": [text]})

    def add_reasoning(self, text: str) -> None:
        """What the assistant thought before what comes next."""
        self._assistant().setdefault("reasoning_content", []).append(text)

    def add_tool_call(self, call_id: str, name: str, arguments: Any) -> None:
        """A call that the assistant has made; `arguments` is an object, or a text that is none."""
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant().setdefault("tool_calls", []).append(call)
        self._function_names[call_id] = name

    def add_tool_result(self, call_id: str, text: str) -> None:
        """What a tool has answered; KeyError if no call before it has this id."""
        name = self._function_names[call_id]
        self._messages.append({"role": "tool", "tool_call_id": call_id, "name": name, "content": [text]})

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The chat so far."""
        return [
            message | {key: "\n".join(filter(None, message[key])) for key in TEXT_KEYS if key in message}
            for message in self._messages
        ]

    def _assistant(self) -> dict[str, Any]:
        if not self._is_open("assistant"):
            self._messages.append({"role": "assistant", "content": []})
        return self._messages[-1]

    def _is_open(self, role: str) -> bool:
        """Whether what comes next of this role belongs to the last message."""
        return bool(self._messages) and self._messages[-1]["role"] == role
