"""How a family of models writes tool calls: what a grammar that forces them has to spell."""

from collections.abc import Sequence

import msgspec


class ToolFormat(msgspec.Struct, frozen=True):
    """A call is `before_name`, its name, `after_name`, its arguments as a JSON object, `after_arguments`.

    Calls stand between `begin` and `end`, with `separator` between them. Special tokens in these texts are meant as such.
    `opening` is what each call begins with, or all of them, and no other text holds; "" where there is no such thing.
    """

    before_name: str
    after_name: str
    after_arguments: str = ""
    begin: str = ""
    separator: str = ""
    end: str = ""
    opening: str = ""

    def write(self, name: str, arguments: str) -> str:
        """One call, with its arguments as JSON text."""
        return self.before_name + name + self.after_name + arguments + self.after_arguments

    def write_all(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls in a row, as an answer has them: names and arguments as JSON text."""
        return self.begin + self.separator.join(self.write(*call) for call in calls) + self.end


def deepseek_tag(words: str) -> str:
    """One of DeepSeek's special tokens, which are not in ASCII."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


DEEPSEEK_CALLS, DEEPSEEK_CALLS_END = deepseek_tag("tool calls begin"), deepseek_tag("tool calls end")
DEEPSEEK_OPEN, DEEPSEEK_CLOSE = deepseek_tag("tool call begin"), deepseek_tag("tool call end")
DEEPSEEK_SEPARATOR = deepseek_tag("tool sep")

QWEN_CODER = ToolFormat('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n")  # if forced
HERMES = msgspec.structs.replace(QWEN_CODER, opening="<tool_call>")
LLAMA3 = ToolFormat('{"name": "', '", "parameters": ', "}", separator="; ")
MISTRAL = ToolFormat('{"name": "', '", "arguments": ', "}", "[TOOL_CALLS] [", ", ", "]", "[TOOL_CALLS]")
MISTRAL_V11 = ToolFormat("[TOOL_CALLS]", "[ARGS]", opening="[TOOL_CALLS]")
DEEPSEEK_V3 = ToolFormat(
    f"{DEEPSEEK_OPEN}function{DEEPSEEK_SEPARATOR}",
    "\n```json\n",
    f"\n```{DEEPSEEK_CLOSE}",
    DEEPSEEK_CALLS,
    "\n",
    DEEPSEEK_CALLS_END,
    DEEPSEEK_OPEN,
)
DEEPSEEK_V31 = msgspec.structs.replace(
    DEEPSEEK_V3, before_name=DEEPSEEK_OPEN, after_name=DEEPSEEK_SEPARATOR, after_arguments=DEEPSEEK_CLOSE, separator=""
)
HARMONY = ToolFormat("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>")
