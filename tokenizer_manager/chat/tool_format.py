"""How a family of models writes tool calls: what a grammar that forces them has to spell."""

import msgspec


class ToolFormat(msgspec.Struct, frozen=True):
    """A call is `before_name`, its name, `after_name`, its arguments as a JSON object, `after_arguments`.

    Calls stand between `begin` and `end`, with `separator` between them. Special tokens in these texts are meant as such.
    """

    before_name: str
    after_name: str
    after_arguments: str = ""
    begin: str = ""
    separator: str = ""
    end: str = ""

    def write(self, name: str, arguments: str) -> str:
        """One call, with its arguments as JSON text."""
        return self.before_name + name + self.after_name + arguments + self.after_arguments


def deepseek_tag(words: str) -> str:
    """One of DeepSeek's special tokens, which are not in ASCII."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


DEEPSEEK_CALLS, DEEPSEEK_CALLS_END = deepseek_tag("tool calls begin"), deepseek_tag("tool calls end")
DEEPSEEK_OPEN, DEEPSEEK_CLOSE = deepseek_tag("tool call begin"), deepseek_tag("tool call end")
DEEPSEEK_SEPARATOR = deepseek_tag("tool sep")

HERMES = ToolFormat('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n")
LLAMA3 = ToolFormat('{"name": "', '", "parameters": ', "}", separator="; ")
MISTRAL = ToolFormat('{"name": "', '", "arguments": ', "}", "[TOOL_CALLS] [", ", ", "]")
MISTRAL_V11 = ToolFormat("[TOOL_CALLS]", "[ARGS]")
DEEPSEEK_V3 = ToolFormat(
    f"{DEEPSEEK_OPEN}function{DEEPSEEK_SEPARATOR}",
    "\n```json\n",
    f"\n```{DEEPSEEK_CLOSE}",
    DEEPSEEK_CALLS,
    "\n",
    DEEPSEEK_CALLS_END,
)
DEEPSEEK_V31 = ToolFormat(DEEPSEEK_OPEN, DEEPSEEK_SEPARATOR, DEEPSEEK_CLOSE, DEEPSEEK_CALLS, "", DEEPSEEK_CALLS_END)
HARMONY = ToolFormat("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>")
