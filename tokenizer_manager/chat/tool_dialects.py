"""How families of models write tool calls: one program each, from the text behind the reasoning to content and calls."""

from typing import Any

import msgspec

from .output_parser import MAX_NAME_LEN, Parse
from .text_reader import Malformed, Reading
from .tool_format import DEEPSEEK_CALLS, DEEPSEEK_CALLS_END, DEEPSEEK_CLOSE, DEEPSEEK_OPEN, DEEPSEEK_SEPARATOR

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
PARAMETER_CLOSE = "</parameter>"
PYTHON_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
PYTHON_TAG = "<|python_tag|>"
MISTRAL_OPEN, MISTRAL_ID, MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def hermes(parse: Parse) -> Reading[None]:
    """Hermes, Qwen and many others: <tool_call>{"name": ..., "arguments": {...}}</tool_call>; Qwen3-Coder's XML in it."""
    while (yield from _content_until(parse, HERMES_OPEN)):
        yield from parse.call(_hermes_call(parse))


def llama3(parse: Parse) -> Reading[None]:
    """Llama 3: {"name": ..., "parameters": {...}} as the whole answer or behind <|python_tag|>, more behind ";"."""
    if (yield from parse.reader.comes("{")):
        yield from _llama_calls(parse)
    while (yield from _content_until(parse, PYTHON_TAG)):
        yield from _llama_calls(parse)


def mistral(parse: Parse) -> Reading[None]:
    """Mistral: [TOOL_CALLS] and a list of objects, or (since v11) [TOOL_CALLS]name[ARGS]{...} for each call."""
    while (yield from _content_until(parse, MISTRAL_OPEN)):
        is_good = yield from parse.call(_mistral_call(parse))
        while is_good and (yield from parse.reader.comes(",")):
            is_good = yield from parse.call(_next_in_list(parse))
        if is_good and (yield from parse.reader.comes("]")):
            yield from parse.reader.skip_space()
            parse.reader.take(1)


def deepseek(parse: Parse) -> Reading[None]:
    """DeepSeek V3 ("function", separator, name, a JSON code fence) and V3.1 (name, separator, JSON)."""
    while tag := (yield from _content_until(parse, DEEPSEEK_OPEN, DEEPSEEK_CALLS, DEEPSEEK_CALLS_END)):
        if tag == DEEPSEEK_OPEN:
            yield from parse.call(_deepseek_call(parse))
        else:
            yield from parse.reader.skip_space()
            parse.reader.take(len(tag))


def _content_until(parse: Parse, *tags: str) -> Reading[str]:
    """Content up to the first of `tags`, which is returned and not taken. White space around calls says nothing."""
    return (yield from parse.reader.pass_until(tags, parse.writer.content, keeps_end=not parse.writer.num_calls))


def _hermes_call(parse: Parse) -> Reading[None]:
    reader = parse.reader
    yield from _open(parse, HERMES_OPEN)
    yield from reader.skip_space()
    if (yield from reader.peek()) == "<":
        yield from _xml_call(parse)
    else:
        yield from parse.object_call()
    yield from reader.skip_space()
    yield from reader.expect(HERMES_CLOSE)


def _xml_call(parse: Parse) -> Reading[None]:
    """<function=NAME> and a <parameter=KEY> for each argument, whose text the function's schema gives a type."""
    reader, writer = parse.reader, parse.writer
    yield from reader.expect("<function=")
    name = yield from reader.until((">",), MAX_NAME_LEN)
    reader.take(1)
    properties = parse.tools.get(name, {}).get("properties", {})
    parse.begin_call(name)
    parse.resume_recording()
    separator = "{"
    while (yield from reader.comes("<parameter=")):
        yield from _open(parse, "<parameter=")
        key = yield from reader.until((">",), MAX_NAME_LEN)
        reader.take(1)
        yield from reader.find("\n")
        writer.arguments(f"{separator}{_encode(key)}: ")
        yield from _xml_value(parse, properties.get(key))
        parse.resume_recording()
        separator = ", "
    writer.arguments("{}" if separator == "{" else "}")
    parse.resume_recording()
    yield from reader.skip_space()
    yield from reader.expect("</function>")


def _xml_value(parse: Parse, schema: Any) -> Reading[None]:
    """A parameter's value: a string as it comes, another type once it is whole."""
    reader, writer = parse.reader, parse.writer
    kind = schema.get("type", "string") if isinstance(schema, dict) else "string"
    ends = ("\n" + PARAMETER_CLOSE, PARAMETER_CLOSE)
    if "string" in (kind if isinstance(kind, list) else [kind]):
        writer.arguments('"')
        end = yield from reader.pass_until(ends, lambda text: writer.arguments(_encode(text)[1:-1]), keeps_space=True)
        writer.arguments('"' if end else "")
    else:
        pieces: list[str] = []
        end = yield from reader.pass_until(ends, pieces.append, keeps_space=True)
        writer.arguments(_typed("".join(pieces)))
    if not end:
        raise Malformed
    reader.take(len(end))


def _llama_calls(parse: Parse) -> Reading[None]:
    is_good = yield from parse.call(_llama_call(parse))
    while is_good and (yield from parse.reader.comes(";")):
        is_good = yield from parse.call(_llama_call(parse))


def _llama_call(parse: Parse) -> Reading[None]:
    reader = parse.reader
    yield from reader.skip_space()
    if not (yield from reader.find(";")):
        yield from reader.find(PYTHON_TAG)
    yield from reader.skip_space()
    yield from parse.object_call()


def _mistral_call(parse: Parse) -> Reading[None]:
    reader = parse.reader
    yield from _open(parse, MISTRAL_OPEN)
    yield from reader.skip_space()
    if (yield from reader.find("[")):
        yield from reader.skip_space()
    if (yield from reader.peek()) == "{":
        yield from parse.object_call()
        return
    name = yield from reader.until((MISTRAL_ID, MISTRAL_ARGUMENTS), MAX_NAME_LEN)
    if (yield from reader.find(MISTRAL_ID)):
        yield from reader.until((MISTRAL_ARGUMENTS,), MAX_NAME_LEN)
    yield from reader.expect(MISTRAL_ARGUMENTS)
    yield from parse.named_arguments(name.strip())


def _next_in_list(parse: Parse) -> Reading[None]:
    yield from _open(parse, ",")
    yield from parse.reader.skip_space()
    yield from parse.object_call()


def _deepseek_call(parse: Parse) -> Reading[None]:
    reader = parse.reader
    yield from _open(parse, DEEPSEEK_OPEN)
    name = yield from reader.until((DEEPSEEK_SEPARATOR,), MAX_NAME_LEN)
    yield from reader.expect(DEEPSEEK_SEPARATOR)
    fenced = name.strip() == "function" and (yield from reader.peek()) != "{"
    if fenced:
        name = yield from reader.until(("\n",), MAX_NAME_LEN)
        yield from reader.skip_space()
        yield from reader.expect("```json")
    yield from reader.skip_space()
    yield from parse.named_arguments(name.strip())
    yield from reader.skip_space()
    if fenced:
        yield from reader.expect("```")
    yield from reader.expect(DEEPSEEK_CLOSE)


def _open(parse: Parse, tag: str) -> Reading[None]:
    """Take a tag that has been seen, and the white space ahead of it."""
    yield from parse.reader.skip_space()
    yield from parse.reader.expect(tag)


def _typed(text: str) -> str:
    """A parameter's text as the JSON value that it is, else as a string."""
    plain = PYTHON_CONSTANTS.get(text.strip(), text)
    try:
        return _encode(msgspec.json.decode(plain))
    except (msgspec.MsgspecError, RecursionError):
        return _encode(text)


def _encode(value: Any) -> str:
    return msgspec.json.encode(value).decode()
