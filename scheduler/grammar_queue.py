"""The grammars that rank 0 knows or is told of, and the requests that wait until theirs is compiled.

A grammar is announced with the first request that brings it, in the batch stream, and used once GrammarReady says so.
Those that no request uses are kept for the next one, the last MAX_IDLE_GRAMMARS of them, and then freed. What rank 0
holds is bounded by its texts, and so in memory: compiled, a text takes up to some 80 times its length, and up to 25 MB
more when requests have followed it through all states that its lexer may have.
"""

from collections import OrderedDict
from collections.abc import Iterator

from ..common.batch_messages import GrammarReady
from .req import Req

MAX_IDLE_GRAMMARS = 32
MAX_IDLE_CHARS = 2**19
MAX_HELD_CHARS = 2**24  # idle or not; what is beyond waits until others are freed


class Grammar:
    """One grammar: its number in the batch stream, and the live requests that follow it."""

    __slots__ = ("is_held", "is_ready", "number", "reqs", "text", "waiting")

    def __init__(self, number: int, text: str) -> None:
        self.number = number
        self.text = text
        self.is_held = False  # rank 0 has it, or has been told of it
        self.is_ready = False
        self.reqs: dict[str, Req] = {}
        self.waiting: dict[str, Req] = {}


class GrammarQueue:
    """Iterating gives the requests that wait here."""

    def __init__(self) -> None:
        self._by_text: dict[str, Grammar] = {}
        self._by_number: dict[int, Grammar] = {}
        self._idle: OrderedDict[int, Grammar] = OrderedDict()  # ready, and used by none; the oldest first
        self._next_number = 0
        self._num_waiting = 0
        self._untold: OrderedDict[int, Grammar] = OrderedDict()  # not announced yet; the oldest first
        self._idle_chars = 0
        self._held_chars = 0
        self._new: dict[int, str] = {}
        self._freed: list[int] = []

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Req]:
        return (req for grammar in self._by_number.values() for req in grammar.waiting.values())

    @property
    def num_grammars(self) -> int:
        """Grammars that rank 0 holds, or will."""
        return len(self._by_number)

    @property
    def has_news(self) -> bool:
        """Whether a grammar waits to be announced."""
        return bool(self._new)

    def add(self, req: Req) -> bool:
        """A new request follows its grammar. Whether it may run; else it waits here."""
        text = req.message.grammar
        assert text is not None, "only requests with a grammar come here"
        grammar = self._by_text.get(text) or self._add_grammar(text)
        req.grammar = grammar.number
        grammar.reqs[req.rid] = req
        if self._idle.pop(grammar.number, None) is not None:
            self._idle_chars -= len(text)
        if not grammar.is_ready:
            grammar.waiting[req.rid] = req
            self._num_waiting += 1
        return grammar.is_ready

    def remove(self, req: Req) -> None:
        """A waiting request waits no more."""
        del self._by_number[req.grammar].waiting[req.rid]
        self._num_waiting -= 1

    def release(self, req: Req) -> None:
        """A request has ended: its grammar may be freed."""
        grammar = self._by_number.get(req.grammar)
        if grammar is not None and grammar.reqs.pop(req.rid, None) is not None:
            self._keep_idle(grammar)

    def retire(self, req: Req) -> None:
        """A request has failed in the worker, maybe by what others did to its lexer: the next one has it compiled anew."""
        grammar = self._by_number.get(req.grammar)
        if grammar is not None and self._by_text.get(grammar.text) is grammar:
            del self._by_text[grammar.text]

    def on_ready(self, message: GrammarReady) -> list[Req]:
        """Rank 0 has compiled a grammar, or can't: those that wait for it, until they are removed. Unknown: none."""
        grammar = self._by_number.get(message.number)
        if grammar is None or grammar.is_ready or not grammar.is_held:
            return []
        if message.error is None:
            grammar.is_ready = True
            self._keep_idle(grammar)
        else:
            del self._by_text[grammar.text]
            self._let_go(grammar)
            if not grammar.reqs:
                del self._by_number[grammar.number]
            self._announce()
        return list(grammar.waiting.values())

    def take_news(self) -> tuple[dict[int, str], list[int]]:
        """What the next batch announces: new grammars by number, and those that are used no more."""
        news = (self._new, self._freed)
        self._new, self._freed = {}, []
        return news

    def broken_invariants(self) -> Iterator[str]:
        """What is wrong here; the scheduler's invariants ask."""
        if self._num_waiting != sum(len(grammar.waiting) for grammar in self._by_number.values()):
            yield f"the grammar queue counts {self._num_waiting} requests"
        for grammar in self._by_number.values():
            if (grammar.is_ready and grammar.waiting) or not grammar.waiting.keys() <= grammar.reqs.keys():
                yield f"requests wait for grammar {grammar.number}, which is ready or does not know them"
            if (grammar.is_ready and not grammar.reqs) != (grammar.number in self._idle):
                yield f"grammar {grammar.number} has {len(grammar.reqs)} requests, and is idle or not"
        if len(self._idle) > MAX_IDLE_GRAMMARS or self._idle_chars > MAX_IDLE_CHARS:
            yield f"{len(self._idle)} idle grammars of {self._idle_chars} characters are kept"
        if self._held_chars != sum(len(grammar.text) for grammar in self._by_number.values() if grammar.is_held):
            yield f"the grammars that are held are counted as {self._held_chars} characters"

    def _add_grammar(self, text: str) -> Grammar:
        grammar = Grammar(self._next_number, text)
        self._next_number += 1
        self._by_text[text] = self._by_number[grammar.number] = self._untold[grammar.number] = grammar
        self._announce()
        return grammar

    def _announce(self) -> None:
        """What fits beside those that are held, idle ones making room. One alone always fits."""
        while self._untold:
            grammar = next(iter(self._untold.values()))
            while self._idle and self._held_chars + len(grammar.text) > MAX_HELD_CHARS:
                self._free_oldest()
            if self._held_chars and self._held_chars + len(grammar.text) > MAX_HELD_CHARS:
                return
            del self._untold[grammar.number]
            grammar.is_held = True
            self._held_chars += len(grammar.text)
            self._new[grammar.number] = grammar.text

    def _keep_idle(self, grammar: Grammar) -> None:
        """Where nobody follows it any more. One that is being compiled waits for that; others are forgotten."""
        if grammar.reqs:
            return
        if grammar.is_ready and self._by_text.get(grammar.text) is not grammar:
            self._free(grammar)
        elif grammar.is_ready:
            self._idle[grammar.number] = grammar
            self._idle_chars += len(grammar.text)
            while len(self._idle) > MAX_IDLE_GRAMMARS or self._idle_chars > MAX_IDLE_CHARS:
                self._free_oldest()
        elif not grammar.is_held:
            self._drop(grammar)
        self._announce()

    def _free_oldest(self) -> None:
        _, grammar = self._idle.popitem(last=False)
        self._idle_chars -= len(grammar.text)
        self._free(grammar)

    def _free(self, grammar: Grammar) -> None:
        self._drop(grammar)
        self._freed.append(grammar.number)

    def _drop(self, grammar: Grammar) -> None:
        """It is new to the next request that brings it."""
        if self._by_text.get(grammar.text) is grammar:
            del self._by_text[grammar.text]
        del self._by_number[grammar.number]
        self._untold.pop(grammar.number, None)
        self._let_go(grammar)

    def _let_go(self, grammar: Grammar) -> None:
        """Rank 0 does not have it any more."""
        if grammar.is_held:
            grammar.is_held = False
            self._held_chars -= len(grammar.text)
