"""How a model writes its answers to chats, found from its chat template, or named by --tool-call-parser and
--reasoning-parser."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from ...common.flags import ConfigError
from . import tool_format
from .delta import OutputParser, PlainParser
from .delta_writer import MAX_CALLS, ContentPlace, DeltaWriter, NewWriter, new_call_id, new_short_id
from .output_parser import Parse, Program, ProgramParser, only_content
from .reasoning_programs import CHANNEL, ENDS, MESSAGE, START, harmony, read_reasoning
from .template_habits import TemplateHabits, find_habits
from .text_reader import Reading
from .tool_dialects import deepseek, hermes, llama3, mistral
from .tool_format import ToolFormat

AUTO, NONE, HARMONY, RESPONSE_TEMPLATE = "auto", "none", "gpt-oss", "response_template"
TemplateReader = Callable[[str, Sequence[Mapping[str, Any]], NewWriter, bool], OutputParser]


class ToolDialect(msgspec.Struct, frozen=True):
    """How a family writes tool calls. `marks` are texts of its templates; `tags` may be special tokens."""

    program: Program
    format: ToolFormat
    marks: tuple[str, ...]
    tags: tuple[str, ...]
    new_id: Callable[[], str] = new_call_id


class ReasoningStyle(msgspec.Struct, frozen=True):
    """The tags around reasoning. `is_always_inside`: answers begin with reasoning, and have no opening tag."""

    tags: tuple[str, str]
    is_always_inside: bool = False

    def is_open_behind(self, prompt: str) -> bool:
        """Whether a prompt, which ends with no white space, has the answer begin inside of it."""
        opening, closing = self.tags
        return prompt.endswith(opening) or (self.is_always_inside and not prompt.endswith(closing))


TOOL_DIALECTS = {
    "deepseek": ToolDialect(
        deepseek, tool_format.DEEPSEEK_V3, (tool_format.DEEPSEEK_CALLS,), (tool_format.DEEPSEEK_OPEN,)
    ),
    "mistral": ToolDialect(mistral, tool_format.MISTRAL, ("[TOOL_CALLS]",), ("[TOOL_CALLS]",), new_short_id),
    "hermes": ToolDialect(hermes, tool_format.HERMES, ("<tool_call>",), ("<tool_call>",)),
    "llama3": ToolDialect(llama3, tool_format.LLAMA3, ('{"name": function name, "parameters"',), ("<|python_tag|>",)),
}
VARIANTS = {  # a mark in the template -> another way of the same family
    "hermes": ("<function=", tool_format.QWEN_CODER),
    "mistral": ("[ARGS]", tool_format.MISTRAL_V11),
    "deepseek": (f"['name'] + '{tool_format.DEEPSEEK_SEPARATOR}", tool_format.DEEPSEEK_V31),
}
REASONING_STYLES = {
    "think": ReasoningStyle(("<think>", "</think>")),
    "deepseek-r1": ReasoningStyle(("<think>", "</think>"), is_always_inside=True),
    "magistral": ReasoningStyle(("[THINK]", "[/THINK]")),
}
ALIASES = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_coder": "hermes",
    "llama3_json": "llama3",
    "deepseekv3": "deepseek",
    "deepseekv31": "deepseek",
    "qwen3": "think",
    "deepseek-v3": "think",
}
TOOL_CALL_PARSERS = (AUTO, NONE, *TOOL_DIALECTS, HARMONY)
REASONING_PARSERS = (AUTO, NONE, *REASONING_STYLES, HARMONY)


class ChatFamily(msgspec.Struct, frozen=True):
    """What is known of a model's chats. The parsers are names; "none" reads nothing out of the text."""

    tool_call_parser: str = NONE
    reasoning_parser: str = NONE
    habits: TemplateHabits = TemplateHabits()
    variant: ToolFormat | None = None
    read_template: TemplateReader | None = None

    @property
    def forced_format(self) -> ToolFormat:
        """How calls are written where they are forced: as the model would, or as Hermes."""
        if self.tool_call_parser == HARMONY:
            return tool_format.HARMONY
        return self.variant or self._dialect.format

    @property
    def strict_format(self) -> ToolFormat | None:
        """How calls are written by the model's own choice, where one can be told from other text as it begins."""
        is_known = self.tool_call_parser in TOOL_DIALECTS and self.forced_format.opening
        return self.forced_format if is_known else None

    @property
    def reasoning_tags(self) -> tuple[str, ...]:
        """Those around reasoning, where there are some."""
        style = REASONING_STYLES.get(self.reasoning_parser)
        return style.tags if style else ()

    @property
    def forces_one_call(self) -> bool:
        """Whether one answer holds no more than one call."""
        return self.tool_call_parser == HARMONY

    @property
    def tags(self) -> tuple[str, ...]:
        """Texts that a parser must see, special tokens or not."""
        tags = self._dialect.tags if self.tool_call_parser in TOOL_DIALECTS else ()
        if HARMONY in (self.tool_call_parser, self.reasoning_parser):
            tags += (CHANNEL, MESSAGE, START, *ENDS)
        return tags + self.reasoning_tags

    def parser(
        self,
        tools: Sequence[Mapping[str, Any]],
        prompt: str,
        *,
        is_bound: bool = False,
        content_goes: ContentPlace = "anywhere",
        separates: bool = True,
        parallel: bool = True,
    ) -> OutputParser:
        """What reads one answer.

        `is_bound`: a grammar has it begin with the answer or a call, not with reasoning. `separates` reasoning from content. Of calls that are not `parallel` only the first counts.
        """
        new_writer = partial(
            DeltaWriter,
            new_id=self._dialect.new_id,
            max_calls=MAX_CALLS if parallel else 1,
            content_goes=content_goes,
        )
        if self.read_template is not None and not is_bound:
            return self.read_template(prompt, tools, new_writer, separates)
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        if HARMONY in (self.tool_call_parser, self.reasoning_parser):
            program: Program = partial(harmony, separates=separates, has_tools=bool(tools))
            return ProgramParser(program, schemas, new_writer)
        style = REASONING_STYLES.get(self.reasoning_parser) if separates and not is_bound else None
        reads_calls = bool(tools) and (is_bound or self.tool_call_parser != NONE)
        if style is None and not reads_calls:
            return PlainParser()
        is_inside = style is not None and style.is_open_behind(prompt.rstrip())
        program = partial(_reasoning_then, style, is_inside, self._dialect.program if reads_calls else only_content)
        return ProgramParser(program, schemas, new_writer)

    @property
    def _dialect(self) -> ToolDialect:
        return TOOL_DIALECTS.get(self.tool_call_parser, TOOL_DIALECTS["hermes"])


def find_chat_family(
    templates: Mapping[str, str],
    tool_call_parser: str,
    reasoning_parser: str,
    response_template: Mapping[str, Any] | None = None,
) -> ChatFamily:
    """What the templates tell; a parser that is not "auto" is taken as named. ConfigError for an unknown name."""
    text = "\n".join(templates.values())
    tool_call_parser = ALIASES.get(tool_call_parser, tool_call_parser)
    reasoning_parser = ALIASES.get(reasoning_parser, reasoning_parser)
    _check_name("--tool-call-parser", tool_call_parser, TOOL_CALL_PARSERS)
    _check_name("--reasoning-parser", reasoning_parser, REASONING_PARSERS)
    habits = find_habits(text)
    if AUTO not in (tool_call_parser, reasoning_parser):
        response_template = None
    if tool_call_parser == AUTO:
        tool_call_parser = RESPONSE_TEMPLATE if response_template else _find_dialect(text, habits.takes_tools)
    if reasoning_parser == AUTO:
        reasoning_parser = RESPONSE_TEMPLATE if response_template else _find_reasoning(text)
    mark, variant = VARIANTS.get(tool_call_parser, ("", None))
    return ChatFamily(
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        habits=habits,
        variant=variant if mark and mark in text else None,
        read_template=_template_reader(response_template) if response_template else None,
    )


def _template_reader(spec: Mapping[str, Any]) -> TemplateReader:
    """Loads transformers, which takes seconds: only where a tokenizer brings a response template."""
    module = importlib.import_module(".response_template", __package__)
    return partial(module.ResponseTemplateParser, module.compile_response_template(spec))


def _check_name(flag: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise ConfigError(f"{flag} must be one of {', '.join(known)}, not {name!r}")


def _find_dialect(text: str, takes_tools: bool) -> str:
    """Where the template knows no tools we write the prompt ourselves, as Hermes' if it has no calls either."""
    if not takes_tools:
        return "deepseek" if tool_format.DEEPSEEK_CALLS in text else "hermes"
    if "<|channel|>" in text and "<|message|>" in text:
        return HARMONY
    if "<arg_key>" in text:  # GLM's, which is no dialect of ours
        return NONE
    return next((name for name, kind in TOOL_DIALECTS.items() if any(mark in text for mark in kind.marks)), NONE)


def _find_reasoning(text: str) -> str:
    if "<|channel|>" in text and "<|message|>" in text:
        return HARMONY
    if "<think>" in text:
        return "think"
    if "</think>" in text:
        return "deepseek-r1"
    return "magistral" if "[THINK]" in text else NONE


def _reasoning_then(style: ReasoningStyle | None, is_inside: bool, answer: Program, parse: Parse) -> Reading[None]:
    if style is not None:
        yield from read_reasoning(parse, style.tags, is_inside=is_inside)
    yield from answer(parse)
