"""The grammars that rank 0 knows or is told of, and the requests that wait until theirs is compiled.

A grammar is announced with the first request that brings it, in the batch stream, and used once GrammarReady says so.
Those that no request uses are kept for the next one, the last `max_idle` of them, and then freed.
"""

from collections import OrderedDict
from collections.abc import Iterator

from ..common.batch_messages import GrammarReady
from .req import Req

MAX_IDLE_GRAMMARS = 64


class Grammar:
    """One grammar: its number in the batch stream, and the live requests that follow it."""

    __slots__ = ("is_ready", "number", "reqs", "text", "waiting")

    def __init__(self, number: int, text: str) -> None:
        self.number = number
        self.text = text
        self.is_ready = False
        self.reqs: dict[str, Req] = {}
        self.waiting: dict[str, Req] = {}


class GrammarQueue:
    """Iterating gives the requests that wait here."""

    def __init__(self, max_idle: int = MAX_IDLE_GRAMMARS) -> None:
        self._max_idle = max_idle
        self._by_text: dict[str, Grammar] = {}
        self._by_number: dict[int, Grammar] = {}
        self._idle: OrderedDict[int, Grammar] = OrderedDict()  # ready, and used by none; the oldest first
        self._next_number = 0
        self._num_waiting = 0
        self._new: dict[int, str] = {}
        self._freed: list[int] = []

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Req]:
        return (req for grammar in self._by_number.values() for req in grammar.waiting.values())

    @property
    def num_grammars(self) -> int:
        """Grammars that rank 0 holds, or is about to."""
        return len(self._by_number)

    @property
    def has_news(self) -> bool:
        """Whether a grammar waits to be announced."""
        return bool(self._new)

    def add(self, req: Req) -> bool:
        """A new request follows its grammar. Whether it may run; else it waits here."""
        text = req.message.grammar
        assert text is not None, "only requests with a grammar come here"
        grammar = self._by_text.get(text) or self._announce(text)
        req.grammar = grammar.number
        grammar.reqs[req.rid] = req
        self._idle.pop(grammar.number, None)
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

    def on_ready(self, message: GrammarReady) -> list[Req]:
        """Rank 0 has compiled a grammar, or can't: those that wait for it, until they are removed. Unknown: none."""
        grammar = self._by_number.get(message.number)
        if grammar is None or grammar.is_ready:
            return []
        if message.error is None:
            grammar.is_ready = True
            self._keep_idle(grammar)
        else:
            del self._by_text[grammar.text]
            if not grammar.reqs:
                del self._by_number[grammar.number]
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
        if len(self._idle) > self._max_idle:
            yield f"{len(self._idle)} idle grammars are kept"

    def _announce(self, text: str) -> Grammar:
        grammar = Grammar(self._next_number, text)
        self._next_number += 1
        self._by_text[text] = self._by_number[grammar.number] = grammar
        self._new[grammar.number] = text
        return grammar

    def _keep_idle(self, grammar: Grammar) -> None:
        """Where nobody follows it any more. One that failed is forgotten; one that is being compiled waits for that."""
        if grammar.reqs:
            return
        if self._by_text.get(grammar.text) is not grammar:
            del self._by_number[grammar.number]
        elif grammar.is_ready:
            self._idle[grammar.number] = grammar
            if len(self._idle) > self._max_idle:
                self._free(self._idle.popitem(last=False)[1])

    def _free(self, grammar: Grammar) -> None:
        del self._by_text[grammar.text], self._by_number[grammar.number]
        self._freed.append(grammar.number)
