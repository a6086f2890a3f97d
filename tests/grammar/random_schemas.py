"""Random JSON Schemas, and texts that their grammars admit: each must be valid.

    python -m tests.grammar.random_schemas [--seed N] [--seconds S]

Prints every text that is not; exit code 1 if there was any.
"""

import argparse
import json
import random
import re
import sys
import time
from typing import Any

import jsonschema
from llguidance import LLMatcher, LLTokenizer

from millstream.common.grammar_tokenizer import parser_limits
from millstream.tokenizer_manager.grammar.grammar_child import Compiler
from millstream.tokenizer_manager.grammar.grammar_messages import Grammar, GrammarSetup

Schema = dict[str, Any]
MAX_BYTES = 200
NUM_TEXTS = 12  # of one schema
LIKELY = b'"}],:{[0123456789.-abn\\"eE'
BEYOND_FLOATS = re.compile(r"\d{15}|[eE]\+?\d{3}")
SETUP = GrammarSetup(seconds=2.0, memory_bytes=2**30, model_path="")
PATTERNS = [
    *(
        r'^[^"]+$',
        r"^[^\\a]*$",
        r'^[^"\\]$',
        r"^\W\w$",
        r"^[\W_]+$",
        r"^\D+$",
        r"[^\s]b",
        r"^[^]a]+$",
        r"^[^-a]$",
        r"a|^b",
    ),
    *(r"^\S+$", r"^.$", r"^[a-c]{2,3}$", r"(?i)^ab$", r"^(?:a|b)+?c$", r"^[\s\S]{1,2}$", r"^[^\d]$", r"^[^\x00-\x1f]$"),
]


class ByteGrammars:
    """Compiled as the server does, for a tokenizer whose tokens are bytes."""

    def __init__(self) -> None:
        self._tokenizer = LLTokenizer("byte")
        self._compiler = Compiler()
        self._compiler._tokenizer = self._tokenizer

    def matcher(self, schema: Any) -> LLMatcher | str:
        """The grammar of a JSON Schema, or why it is refused."""
        reply = self._compiler.answer(SETUP, Grammar("json_schema", json.dumps(schema), "schema"))
        if reply.error is not None:
            return reply.error
        return LLMatcher(self._tokenizer, reply.text, log_level=0, limits=parser_limits())

    def admits(self, schema: Any, value: Any) -> bool:
        """Whether this value may be the answer; it may be given as JSON text in bytes too."""
        matcher = self.matcher(schema)
        assert isinstance(matcher, LLMatcher), matcher
        tokens = list(value if isinstance(value, bytes) else json.dumps(value, ensure_ascii=False).encode())
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def random_text(matcher: LLMatcher, draw: random.Random) -> str | None:
    """One that the grammar admits, byte by byte; None where it became too long."""
    text = bytearray()
    for _ in range(MAX_BYTES):
        if matcher.is_stopped() or (matcher.is_accepting() and draw.random() < 0.5):
            return text.decode(errors="replace")
        mask = matcher.compute_bitmask()
        allowed = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
        if not allowed:
            return None
        likely = [byte for byte in allowed if byte in LIKELY]
        byte = draw.choice(likely if likely and draw.random() < 0.8 else allowed)
        if not matcher.consume_token(byte):
            return None
        text.append(byte)
    return None


def random_schema(draw: random.Random) -> Schema:
    """With definitions at known places and at others."""
    schema = _schema(draw, 3)
    schema["$defs"] = {"x": _schema(draw, 1), "y": _schema(draw, 1)}
    return {**schema, "components": {"schemas": {"X": _schema(draw, 1)}}}


def _schema(draw: random.Random, depth: int) -> Schema:
    kinds = [
        _number,
        _number,
        _string,
        _values,
        *([_array, _object, _merged, _merged, _reference] if depth > 0 else []),
    ]
    return draw.choice(kinds)(draw, depth)


def _number(draw: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": draw.choice(["integer", "number", "number", ["number", "null"]])}
    sign = draw.choice([1, 1, -1])
    for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        if draw.random() < 0.35:
            base = draw.choice([0, 0, 1, 1, 10, 1000001]) + draw.choice([0, 0, 0.5, 0.25, 1])
            schema[key] = sign * base
    if draw.random() < 0.15:
        schema["multipleOf"] = draw.choice([2, 3, 0.5, 0.25])
    if draw.random() < 0.15:
        del schema["type"]
    return schema


def _string(draw: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "string"}
    if draw.random() < 0.7:
        schema["pattern"] = draw.choice(PATTERNS)
    if draw.random() < 0.3:
        schema["minLength"] = draw.randint(0, 3)
    if draw.random() < 0.3:
        schema["maxLength"] = draw.randint(1, 4)
    return schema


def _values(draw: random.Random, depth: int) -> Schema:
    values = [1, 1.5, "a", 'a"\\', None, True, [], {"a": 1}, -3, "\u00e9\n", [[1]], 0]
    return draw.choice([{"const": draw.choice(values)}, {"enum": draw.sample(values, 3)}])


def _array(draw: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "array"}
    if draw.random() < 0.7:
        schema["items"] = draw.choice([False, _schema(draw, depth - 1), _schema(draw, depth - 1)])
    if draw.random() < 0.4:
        schema["prefixItems"] = [_schema(draw, depth - 1) for _ in range(draw.randint(1, 2))]
    if draw.random() < 0.4:
        schema["minItems"] = draw.randint(0, 2)
    if draw.random() < 0.4:
        schema["maxItems"] = draw.randint(1, 3)
    return schema


def _object(draw: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "object"}
    names = ["a", "b", 'q"', "ab"]
    if draw.random() < 0.7:
        schema["properties"] = {name: _schema(draw, depth - 1) for name in draw.sample(names, draw.randint(1, 3))}
    if draw.random() < 0.5:
        schema["required"] = draw.sample(names, draw.randint(1, 2))
    if draw.random() < 0.5:
        schema["additionalProperties"] = draw.choice([False, _schema(draw, depth - 1)])
    if draw.random() < 0.2:
        schema["patternProperties"] = {draw.choice(["^a", '^[^"]+$', "b$"]): _schema(draw, depth - 1)}
    for key in ("minProperties", "maxProperties"):
        if draw.random() < 0.15:
            schema[key] = draw.randint(1, 2)
    return schema


def _merged(draw: random.Random, depth: int) -> Schema:
    kind = draw.choice([_number, _number, _string, _object, _array])
    parts = [kind(draw, depth - 1) for _ in range(2)]
    own = draw.choice([{}, kind(draw, depth - 1)])
    return {**own, draw.choice(["allOf", "anyOf"]): parts}


def _reference(draw: random.Random, depth: int) -> Schema:
    target = draw.choice(["#/$defs/x", "#/$defs/y", "#/components/schemas/X", "#"])
    return {**draw.choice([{}, _number(draw, 0), _object(draw, 1)]), "$ref": target}


def problems(grammars: ByteGrammars, schema: Schema, draw: random.Random) -> tuple[int, list[str]]:
    """How many whole texts of a grammar were looked at, and those that are not valid."""
    found, num_texts = [], 0
    matcher = grammars.matcher(schema)
    if not isinstance(matcher, LLMatcher):
        return 0, []
    validator = jsonschema.Draft202012Validator(schema)
    for _ in range(NUM_TEXTS):
        text = random_text(matcher.deep_copy(), draw)
        if text is None or BEYOND_FLOATS.search(text):
            continue
        num_texts += 1
        error = next(iter(validator.iter_errors(json.loads(text))), None)
        if error is not None:
            found.append(f"{json.dumps(schema)} admits {text}: {error.message}")
    return num_texts, found


def main() -> None:
    """As the module says."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--seconds", type=float, default=60)
    args = arguments.parse_args()
    grammars, end = ByteGrammars(), time.monotonic() + args.seconds
    num_schemas = num_texts = num_bad = 0
    while time.monotonic() < end:
        draw = random.Random(f"{args.seed} {num_schemas}")
        num, bad = problems(grammars, random_schema(draw), draw)
        num_schemas, num_texts, num_bad = num_schemas + 1, num_texts + num, num_bad + len(bad)
        print(*bad, sep="\n", end="\n" if bad else "", flush=True)
    print(f"{num_schemas} schemas, {num_texts} texts, {num_bad} of them not valid")
    sys.exit(1 if num_bad else 0)


if __name__ == "__main__":
    main()
