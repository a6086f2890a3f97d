"""A turn of a chat, from its messages to the deltas of its answer. OpenAI's chat, Responses and Anthropic's messages
are three ways of writing what comes out here."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec

from ...common.logprobs import LogprobReq
from ...common.sampling_params import SamplingParams
from ..api_error import bad_request
from ..call import Call
from ..families import GenerateReq
from ..grammar.grammar_messages import Grammar
from ..grammar.tool_grammar import strict_tool_grammar, tool_grammar
from ..tokenizer_manager import TokenizerManager
from .chat_family import ChatFamily
from .chat_generation import ChatGeneration
from .chat_prompt import ChatRenderer, render_chat
from .delta import OutputParser, PlainParser
from .delta_writer import ContentPlace
from .tool_choice import ToolChoice, callable_tools, check_tools, is_forced


class ChatTurn(msgspec.Struct, kw_only=True, frozen=True):
    """What a client asks for, in no API's words.

    `messages` and `tools` are as chat templates read them. `tool_choice` is "none", "auto", "required", or
    {"name": ...}: a function that must be called. `label` is the client's own id.
    """

    messages: Sequence[dict[str, Any]]
    sampling_params: SamplingParams
    stream: bool = False
    tools: Sequence[dict[str, Any]] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    grammar: Grammar | None = None
    logprobs: LogprobReq | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] | None = None
    separate_reasoning: bool = True
    label: str | None = None
    cache_salt: str | None = None
    priority: int | None = None


class ChatService:
    """Answers turns over one tokenizer manager; `renderer` is None where chat is not served."""

    def __init__(self, manager: TokenizerManager, renderer: ChatRenderer | None, family: ChatFamily) -> None:
        self._manager = manager
        self._renderer = renderer
        self._family = family

    async def input_ids(self, turn: ChatTurn) -> list[int]:
        """The prompt of a turn; APIError naming what is wrong with it."""
        return await self._encode(await self.prompt(turn))

    @asynccontextmanager
    async def start(self, call: Call, turn: ChatTurn) -> AsyncIterator[ChatGeneration]:
        """Render, tokenize and send a turn; leaving the context aborts what has not ended. APIError if it is refused."""
        manager = self._manager
        async with manager.queue_place(call, turn.sampling_params.n):
            prompt = await self.prompt(turn)
            new_parser = self._parser_maker(turn, prompt)
            request = GenerateReq(
                input_ids=await self._encode(prompt),
                sampling_params=self._sampling_params(turn, new_parser()),
                label=turn.label,
                cache_salt=turn.cache_salt,
                priority=turn.priority,
                logprobs=turn.logprobs,
                grammar=await manager.compile_grammar(self._grammar(turn)),
            )
            with manager.generate(call, [request], stream=turn.stream) as generation:
                parsers = [new_parser() for _ in generation.reqs]
                yield ChatGeneration(generation, parsers, manager.encoder.tokenizer, request.sampling_params)

    async def prompt(self, turn: ChatTurn) -> str:
        """The text of a turn's prompt; APIError naming what is wrong with it."""
        check_tools(turn.tools, turn.tool_choice)
        tools = turn.tools if turn.tool_choice != "none" else ()
        as_text = self._manager.encoder.as_text
        messages, tools, kwargs = await as_text(turn.messages, tools, turn.chat_template_kwargs)
        return await render_chat(
            self._renderer,
            self._family.habits.messages(messages, tools, self._family.forced_format),
            tools=self._family.habits.tools(tools),
            add_generation_prompt=turn.add_generation_prompt,
            continue_final_message=turn.continue_final_message,
            chat_template_kwargs=kwargs,
        )

    def _grammar(self, turn: ChatTurn) -> Grammar | None:
        """That of the answer, or of the calls that are forced; of both where the model may choose."""
        tools = callable_tools(turn.tools, turn.tool_choice)
        may_answer = not is_forced(turn.tool_choice)
        if may_answer and turn.grammar is None and any(tool["function"].get("strict") for tool in tools):
            return self._strict_grammar(turn, tools)
        if may_answer and (turn.grammar is None or turn.grammar.kind != "json_schema" or not tools):
            return turn.grammar
        if turn.grammar is not None and not may_answer:
            message = f"{turn.grammar.param} can not be met by an answer that must be a tool call"
            raise bad_request(message, turn.grammar.param, "conflicting_grammars")
        name = turn.tool_choice["name"] if isinstance(turn.tool_choice, dict) else None
        return tool_grammar(
            turn.tools,
            self._family.forced_format,
            self._manager.encoder.tokenizer,
            name=name,
            parallel=turn.parallel_tool_calls and name is None and not self._family.forces_one_call,
            answer=turn.grammar,
        )

    def _strict_grammar(self, turn: ChatTurn, tools: Sequence[dict[str, Any]]) -> Grammar | None:
        """Of an answer whose calls, if there are some, obey; None where the family's calls have no beginning of their own."""
        layout = self._family.strict_format
        if layout is None:
            return None
        return strict_tool_grammar(
            tools,
            layout,
            self._manager.encoder.tokenizer,
            parallel=turn.parallel_tool_calls,
            reasoning_tags=self._family.reasoning_tags,
        )

    def _parser_maker(self, turn: ChatTurn, prompt: str) -> Callable[[], OutputParser]:
        content_goes: ContentPlace = "nowhere" if is_forced(turn.tool_choice) else "anywhere"
        if turn.grammar is not None and turn.grammar.kind == "json_schema":
            content_goes = "ahead"
        tools = callable_tools(turn.tools, turn.tool_choice)
        return partial(
            self._family.parser,
            tools,
            prompt,
            is_bound=content_goes != "anywhere" or turn.grammar is not None,
            content_goes=content_goes,
            separates=turn.separate_reasoning,
            parallel=turn.parallel_tool_calls,
        )

    def _sampling_params(self, turn: ChatTurn, parser: OutputParser) -> SamplingParams:
        """A parser has to see its tags, even those that are special tokens."""
        tokenizer = self._manager.encoder.tokenizer
        tags = {tokenizer.token_to_id(tag) for tag in self._family.tags}
        if isinstance(parser, PlainParser) or tags.isdisjoint(tokenizer.special_token_ids):
            return turn.sampling_params
        return msgspec.structs.replace(turn.sampling_params, skip_special_tokens=False)

    async def _encode(self, prompt: str) -> list[int]:
        found = await self._manager.encoder.prompt_ids(
            [prompt],
            "messages",
            vocab_size=self._manager.vocab_size,
            context_len=self._manager.context_len,
            add_special_tokens=False,
        )
        return found[0]
