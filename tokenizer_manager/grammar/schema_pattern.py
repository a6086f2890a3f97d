r"""Patterns of JSON Schemas as llguidance has to read them: it takes Rust's syntax, and finds them in text as JSON writes it.

What Rust reads differently from the validators (ECMA's syntax, Python's) is refused where both of them read it alike,
and so are the anchors \A and \z. Taken is what only one of them reads otherwise: \p{L} (Python has no such classes, ECMA
only with its flag u), and, as Python has them, \a, the dot at a carriage return or U+2028, \s and \S at U+0085 and U+FEFF.

A class that holds every control character and not the quotation mark or the backslash would match the escaped form of
these too: a negated class gets one control character more, which no string here holds.
"""

import re

from .regex_limits import TOKEN, RegexError

NEVER = r"\x01"  # JSON could write it only as \u0001, which we do not allow
GROUP = re.compile(r"\(\?(?!:|P?<[A-Za-z_]|[is]+:)")
QUANTIFIED_TWICE = re.compile(r"(?:[*+?]|\{\d+(?:,\d*)?\})(?:[*+{]|\?[*+?{])")
CLASSES = {r"\D": r"\p{Nd}", r"\W": r"\p{L}\p{N}\p{M}_"}  # what these exclude, in whatever language
ANCHORS = (r"\A", r"\z")  # letters in ECMA's syntax
SET_OPERATORS = ("&&", "--", "~~")
CONTROLS = [chr(code) for code in range(0x20) if code != 0x0A]
ESCAPE = re.compile(r"\\.", re.DOTALL)
START_FLAGS = re.compile(r"\(\?[is]+\)")


def exact_pattern(pattern: str) -> str:
    """The same pattern in Rust's syntax; RegexError where that is something else."""
    flags = START_FLAGS.match(pattern)
    start = flags.end() if flags else 0
    pieces, skeleton, end = [pattern[:start]], [], start
    for token in TOKEN.finditer(pattern, start):
        plain = pattern[end : token.start()]
        is_atom = token[0][0] in "\\["
        pieces += [plain, _exact_atom(token[0]) if is_atom else token[0]]
        skeleton += [plain, "x" if is_atom else token[0]]
        end = token.end()
    pieces.append(pattern[end:])
    skeleton.append(pattern[end:])
    plain = "".join(skeleton)
    if GROUP.search(plain):
        raise RegexError("of groups that begin with (? only (?:, named ones, and the flags i and s are taken")
    if QUANTIFIED_TWICE.search(plain):
        raise RegexError("a quantifier stands after another one")
    return "".join(pieces)


def _exact_atom(atom: str) -> str:
    """An escape or a class."""
    if atom[0] == "[":
        return _exact_class(atom)
    if atom.startswith((r"\x{", r"\U")):
        raise RegexError(rf"write {atom} as \u and four digits")
    if atom in ANCHORS:
        raise RegexError(r"write ^ and $ for \A and \z")
    return f"[^{NEVER}{CLASSES[atom]}]" if atom in CLASSES else atom


def _exact_class(text: str) -> str:
    is_negated = text.startswith("[^")
    body = text[2 if is_negated else 1 : -1]
    if "[" in ESCAPE.sub("", body) or any(each in body for each in SET_OPERATORS):
        raise RegexError(r"within a class write \[, \&, \- and \~ for [, &&, -- and ~~")
    escapes = set(ESCAPE.findall(body))
    if is_negated:
        foreign = "".join(CLASSES[each.upper()] for each in escapes & {r"\d", r"\w"})
        first = chr(92) if body[:1] in ("]", "-") else ""
        return f"[^{NEVER}{foreign}{first}{body}]"
    if escapes >= {r"\d", r"\D"} or escapes >= {r"\w", r"\W"}:
        return r"[\s\S]"
    if _looks_like_any(text):
        raise RegexError(f"the class {text} has control characters and not the quotation mark or the backslash")
    return f"[{ESCAPE.sub(lambda found: _exact_atom(found[0]), body)}]"


def _looks_like_any(text: str) -> bool:
    try:
        found = re.compile(text)
    except re.error:
        return False
    return all(map(found.match, CONTROLS)) and not (found.match('"') and found.match("\\"))
