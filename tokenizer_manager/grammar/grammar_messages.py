"""A grammar as its client wrote it, and what the checker and its child process say to each other of it."""

from typing import Literal

import msgspec

from ..sandbox.child_frames import ChildReply, ChildSetup

Kind = Literal["json_schema", "regex", "lark", "ebnf"]


class Grammar(msgspec.Struct, frozen=True):
    """Where it stands in the request (`param`) and what it says.

    A "json_schema" is JSON text; "ebnf" is GBNF or Lark. `schemas` are the JSON Schemas inside a "lark" that we wrote
    ourselves: each with the field that brought it.
    """

    kind: Kind
    text: str
    param: str
    schemas: tuple[tuple[str, str], ...] = ()


class GrammarSetup(ChildSetup, frozen=True):
    """The model whose tokenizer the grammars are compiled for."""

    model_path: str


class GrammarReply(ChildReply, frozen=True, kw_only=True):
    """llguidance's grammar; or `error`, with the field that is wrong and the code of it."""

    text: str = ""
    param: str = ""
    code: str = ""
