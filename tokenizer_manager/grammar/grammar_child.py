"""The process that compiles a request's grammar before anything else of it is done.

A grammar that this process can't compile within its limits never reaches the model's process. Start it as
`python -m millstream.tokenizer_manager.grammar.grammar_child`, with one socket as its standard input.
"""

import json
import re
from pathlib import Path
from random import Random
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from ...common.grammar_tokenizer import make_grammar_tokenizer, parser_limits
from ...common.tokenizer import load_tokenizer
from ..sandbox.child_frames import ChildReply
from ..sandbox.killable_process import answer_until_closed, die_with_parent, read_message
from .grammar_messages import Grammar, GrammarReply, GrammarSetup
from .lark import lark_grammar, schema_to_compile
from .regex_limits import MAX_TEXT_CHARS, RegexError, check_regex
from .schema_culprit import find_culprit, written_pointer
from .schema_limits import SchemaError

MAX_ERROR_CHARS = 300
NUM_TRIED_TOKENS = 16

CODES = {
    "json_schema": "invalid_schema",
    "regex": "invalid_regex",
    "lark": "invalid_grammar",
    "ebnf": "invalid_grammar",
}
GBNF_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|::=|[A-Za-z][\w-]*|[|()]', re.DOTALL)
LARK_TEXT = re.compile(r'"(?:\\.|[^"\\\n])*"')
OVERLAPPING = "oneOf is taken only where no value can match two of its branches; anyOf is taken always"


class Refused(ValueError):
    """The grammar can not be used."""


class Compiler:
    """Turns a client's grammar into llguidance's."""

    def __init__(self) -> None:
        self._tokenizer: LLTokenizer | None = None

    def load(self, setup: GrammarSetup) -> ChildReply:
        """Load the model's tokenizer, which may take longer than a grammar."""
        try:
            tokenizer = load_tokenizer(Path(setup.model_path))
            self._tokenizer = make_grammar_tokenizer(tokenizer, tokenizer.vocab_size)
        except (ValueError, OSError) as error:
            return ChildReply(error=f"grammars can not be used with this model's tokenizer: {error}")
        return ChildReply()

    def answer(self, setup: GrammarSetup, grammar: Grammar) -> GrammarReply:
        """llguidance's grammar, compiled once to see that it can be."""
        try:
            for param, schema in grammar.schemas:
                self._check_part(param, schema)
            return GrammarReply(text=self._compiled(grammar))
        except _PartError as error:
            return GrammarReply(error=str(error), param=error.param, code="invalid_schema")
        except (Refused, RegexError, SchemaError) as error:
            return GrammarReply(error=_first_line(str(error)), param=grammar.param, code=CODES[grammar.kind])
        except (MemoryError, RecursionError) as error:
            too = "large" if isinstance(error, MemoryError) else "deeply nested"
            return GrammarReply(error=f"it is too {too}", param=grammar.param, code=CODES[grammar.kind])

    def _compiled(self, grammar: Grammar) -> str:
        if "\0" in grammar.text:
            raise Refused("a grammar must not hold NUL")
        if grammar.kind == "json_schema":
            return self._schema(json.loads(grammar.text))
        if grammar.kind == "regex":
            check_regex(grammar.text)
            return self._checked(LLMatcher.grammar_from_regex(grammar.text))
        lark = to_lark(grammar.text) if grammar.kind == "ebnf" else grammar.text
        if any(len(literal[0]) > MAX_TEXT_CHARS for literal in LARK_TEXT.finditer(lark)):
            raise Refused(f"a text in a grammar must not have more than {MAX_TEXT_CHARS} characters")
        return self._checked(lark_grammar(lark, [json.loads(text) for _, text in grammar.schemas]))

    def _schema(self, schema: Any) -> str:
        """SchemaError names the innermost subschema that can't be compiled."""
        try:
            exact = schema_to_compile(schema)
        except SchemaError as refusal:
            raise SchemaError(written_pointer(schema, refusal.pointer), refusal.message) from None
        text = json_grammar(exact)
        error = self._error(text)
        if error is None:
            return text
        pointer, reason = find_culprit(exact, error, lambda part: self._error(json_grammar(part)))
        raise SchemaError(written_pointer(schema, pointer), _plain(reason))

    def _check_part(self, param: str, text: str) -> None:
        try:
            if "\0" in text or "\\u0000" in text:
                raise Refused("a schema must not hold NUL")
            self._schema(json.loads(text))
        except (Refused, SchemaError) as error:
            raise _PartError(param, _first_line(str(error))) from None

    def _checked(self, grammar: str) -> str:
        error = self._error(grammar)
        if error is not None:
            raise Refused(_plain(error))
        return grammar

    def _error(self, grammar: str) -> str | None:
        """What is wrong with it. That it allows no output, or takes too much, shows only when tokens are allowed by it."""
        if self._tokenizer is None:
            return "grammars can not be used with this model's tokenizer"
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=parser_limits())
        draw = Random(1)  # noqa: S311 - any tokens will do, the same each time
        for _ in range(NUM_TRIED_TOKENS):
            mask = matcher.compute_bitmask()
            if matcher.is_stopped() or not matcher.consume_token(_some_token(mask, draw)):
                break
        if not matcher.is_error():
            return None
        error = matcher.get_error()
        return "it allows no output" if error.startswith("NoExtension") else error


def _some_token(mask: bytes, draw: Random) -> int:
    """One of the tokens that a mask allows, which it does for one at least."""
    place = draw.choice([index for index, byte in enumerate(mask) if byte])
    return 8 * place + draw.choice([bit for bit in range(8) if mask[place] >> bit & 1])


class _PartError(ValueError):
    """A schema inside a grammar that we wrote is refused."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def json_grammar(schema: dict[str, Any]) -> str:
    """llguidance's grammar of a JSON Schema that it can read."""
    return json.dumps({"grammars": [{"json_schema": schema}]})


def to_lark(text: str) -> str:
    """GBNF as Lark; Lark as it is."""
    if "::=" in text and (name := left_recursive_rule(text)):
        raise Refused(f"the rule {name!r} begins with itself; write the grammar as Lark, where it may")
    try:
        return str(any_to_lark(text))
    except RecursionError:
        raise
    except Exception as error:  # noqa: BLE001 - the converter raises what it likes
        raise Refused(str(error)) from None


def left_recursive_rule(gbnf: str) -> str | None:
    """A rule of a GBNF grammar that begins with itself, through other rules too; None where there is none."""
    firsts: dict[str, set[str]] = {}
    rule, previous, was_first, begins = "", "", False, False
    groups: list[bool] = []  # of each that is open: whether it stands at the beginning of its rule
    for symbol in (match[0] for match in GBNF_TOKEN.finditer(gbnf) if match[0][0] != "#"):
        if symbol == "::=":
            if was_first and rule:
                firsts[rule].discard(previous)
            rule, begins, groups = previous, True, []
            firsts.setdefault(rule, set())
        elif symbol == "(":
            groups.append(begins)
        elif symbol == "|":
            begins = groups[-1] if groups else True
        elif symbol == ")":
            begins = bool(groups and groups.pop()) and begins
        else:
            was_first = begins and symbol[0].isalpha()
            if was_first and rule:
                firsts[rule].add(symbol)
            begins, previous = False, symbol
    return next((name for name in firsts if _reaches(firsts, name)), None)


def _reaches(firsts: dict[str, set[str]], name: str) -> bool:
    seen, left = set[str](), list(firsts[name])
    while left:
        each = left.pop()
        if each == name:
            return True
        if each not in seen:
            seen.add(each)
            left += firsts.get(each, ())
    return False


def _plain(error: str) -> str:
    """As the client may read it: about its own grammar, not about the compiler."""
    if error.startswith("oneOf constraints are not supported"):
        return OVERLAPPING
    if "too many expressions" in error or "max is" in error:
        return "it takes too much to follow; make it simpler"
    found = re.search(r"^error: (.*)$", error, re.MULTILINE) if "regex parse error" in error else None
    return f"the regex is wrong: {found[1]}" if found else _first_line(error)


def _first_line(text: str) -> str:
    """One line for the client, without the compiler's own state."""
    return " ".join(text.split("\n<state>", maxsplit=1)[0].split())[:MAX_ERROR_CHARS]


def main() -> None:
    """Load the tokenizer, say ready, compile grammars until end-of-file."""
    die_with_parent("ms:grammars")
    compiler, setup = Compiler(), read_message(GrammarSetup)
    loaded = compiler.load(setup)
    answer_until_closed(setup, Grammar, lambda _: loaded, compiler.answer)


if __name__ == "__main__":
    main()
