"""Grammars of requests, compiled in a killable child before the request goes anywhere: a bad one is its client's 400."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..api_error import APIError, bad_request
from ..metrics import Metrics
from ..sandbox.killable_child import ChildDied, ChildTimeout, KillableChild
from .grammar_messages import Grammar, GrammarReply, GrammarSetup

CHILD = "millstream.tokenizer_manager.grammar.grammar_child"
COMPILE_SECONDS = 2.0
MEMORY_BYTES = 512 * 2**20
MAX_GRAMMAR_CHARS = 128 * 2**10
MAX_EBNF_CHARS = 32 * 2**10  # of one that a client wrote, where a lexeme may be as long as the whole
MAX_GRAMMARS = 64  # different ones of one call, which are compiled one after another
MAX_KNOWN_BYTES = 8 * 2**20

Key = tuple[str, ...]  # kind and texts


class GrammarChecker:
    """Make it, `start` it when the model is known, and use it in one event loop.

    The child starts with the first grammar. Good grammars are remembered, up to MAX_KNOWN_BYTES.
    """

    def __init__(self, metrics: Metrics, *, seconds: float = COMPILE_SECONDS) -> None:
        self._metrics = metrics
        self._seconds = seconds
        self._child: KillableChild[GrammarReply] | None = None
        self._known: OrderedDict[Key, str] = OrderedDict()
        self._known_bytes = 0
        self._shared: dict[Grammar, _Shared] = {}

    @property
    def pid(self) -> int | None:
        """The id of the child's process, if one runs."""
        return self._child.pid if self._child is not None else None

    def start(self, model_path: Path) -> None:
        """From now on grammars are compiled for this model's tokenizer."""
        setup = GrammarSetup(seconds=self._seconds, memory_bytes=MEMORY_BYTES, model_path=str(model_path))
        self._child = KillableChild(CHILD, "grammars", setup, GrammarReply)

    def close(self) -> None:
        """Kill the child and wait for its end."""
        if self._child is not None:
            self._child.close()

    async def compile_all(self, grammars: Sequence[Grammar | None]) -> list[str | None]:
        """`compile` for each, None for none; APIError 400 where too many of them are different."""
        different = {_key(grammar): grammar for grammar in grammars if grammar is not None}
        if len(different) > MAX_GRAMMARS:
            message = f"A call may bring {MAX_GRAMMARS} different grammars at most, not {len(different)}."
            raise bad_request(message, list(different.values())[MAX_GRAMMARS].param, "too_many_grammars")
        compiled = {key: await self.compile(grammar) for key, grammar in different.items()}
        return [None if grammar is None else compiled[_key(grammar)] for grammar in grammars]

    async def compile(self, grammar: Grammar) -> str:
        """llguidance's grammar; APIError names the field, and in a JSON Schema the place, that is wrong."""
        key = _key(grammar)
        num_chars, most = sum(map(len, key)), MAX_EBNF_CHARS if grammar.kind == "ebnf" else MAX_GRAMMAR_CHARS
        if num_chars > most:
            message = f"{grammar.param} has {num_chars} characters; at most {most} are allowed"
            raise bad_request(message, grammar.param, "invalid_grammar")
        known = self._known.get(key)
        if known is None:
            known = await self._share(grammar)
            self._remember(key, known)
        else:
            self._known.move_to_end(key)
        return known

    async def _share(self, grammar: Grammar) -> str:
        """`_ask`, once for all who want the same at the same time; dropped when none of them is left."""
        shared = self._shared.get(grammar)
        if shared is None:
            shared = self._shared[grammar] = _Shared(asyncio.ensure_future(self._ask(grammar)))
        shared.num_waiting += 1
        try:
            return await asyncio.shield(shared.task)
        finally:
            shared.num_waiting -= 1
            if not shared.num_waiting:
                self._shared.pop(grammar, None)
                shared.task.cancel()

    async def _ask(self, grammar: Grammar) -> str:
        if self._child is None:
            raise APIError(503, "Grammars can not be used here.", code="no_grammars")
        start = time.monotonic()
        try:
            reply = await self._child.ask(grammar)
        except ChildTimeout as timeout:
            self._metrics.inc("num_grammar_timeout_total")
            message = f"{grammar.param} took longer than {timeout.seconds:g} s to compile; make it simpler"
            raise bad_request(message, grammar.param, "grammar_timeout") from None
        except ChildDied:
            message = f"{grammar.param} needs too much memory or time to compile; make it simpler"
            raise bad_request(message, grammar.param, "grammar_too_large") from None
        finally:
            self._metrics.observe("grammar_compilation_time_seconds", time.monotonic() - start)
        if reply.error is not None:
            raise bad_request(f"{reply.param}: {reply.error}", reply.param, reply.code)
        return reply.text

    def _remember(self, key: Key, grammar: str) -> None:
        if key not in self._known:
            self._known_bytes += _num_bytes(key, grammar)
        self._known[key] = grammar
        while self._known_bytes > MAX_KNOWN_BYTES:
            self._known_bytes -= _num_bytes(*self._known.popitem(last=False))


@dataclass
class _Shared:
    """A grammar that is being compiled, and how many wait for it."""

    task: asyncio.Future[str]
    num_waiting: int = 0


def _key(grammar: Grammar) -> Key:
    return (grammar.kind, grammar.text, *(text for _, text in grammar.schemas))


def _num_bytes(key: Key, grammar: str) -> int:
    return 4 * (sum(map(len, key)) + len(grammar)) + 500
