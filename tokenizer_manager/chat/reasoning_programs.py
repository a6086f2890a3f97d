"""Reasoning ahead of the answer, between tags; and the channels of gpt-oss, which hold reasoning, answer and calls."""

import re

from .output_parser import Parse
from .text_reader import Malformed, Reading

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MAX_HEADER_LEN = 512
CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w{0,64})")
RECIPIENT = re.compile(r"to=functions\.([^\s<]{1,256})")


def read_reasoning(parse: Parse, tags: tuple[str, str], *, is_inside: bool) -> Reading[None]:
    """Reasoning where the text begins with it. `is_inside`: the prompt has opened it already."""
    reader = parse.reader
    begins = yield from reader.comes(tags[0])
    if not begins and not is_inside:
        return
    parse.begin_reasoning()
    if begins:
        yield from reader.skip_space()
        reader.take(len(tags[0]))
    yield from reader.skip_space()
    if (yield from reader.pass_until((tags[1],), parse.writer.reasoning)):
        yield from reader.skip_space()
        reader.take(len(tags[1]))
    parse.end_reasoning()
    yield from reader.skip_space()


def harmony(parse: Parse, *, separates: bool, has_tools: bool) -> Reading[None]:
    """gpt-oss: <|channel|>NAME<|message|>TEXT<|end|>, the next one begun by <|start|>assistant."""
    reader = parse.reader
    while True:
        tag = yield from reader.pass_until((START, CHANNEL), parse.writer.content)
        if not tag:
            return
        start = reader.position
        reader.record()
        try:
            header = yield from _header(parse)
        except Malformed:
            parse.writer.content(reader.recorded())
            continue
        reader.recorded()
        channel = CHANNEL_NAME.search(header)
        recipient = RECIPIENT.search(header)
        if recipient is not None and has_tools:
            yield from parse.call(parse.named_arguments(recipient[1]))
        elif channel is not None and channel[1] == "analysis" and separates:
            yield from _analysis(parse, start)
        else:
            yield from _body(parse)
        for end in ENDS:
            yield from reader.find(end)


def _analysis(parse: Parse, start: int) -> Reading[None]:
    parse.begin_reasoning(start)
    yield from parse.reader.pass_until((*ENDS, START), parse.writer.reasoning)
    parse.end_reasoning()


def _body(parse: Parse) -> Reading[None]:
    yield from parse.reader.pass_until((*ENDS, START), parse.writer.content)


def _header(parse: Parse) -> Reading[str]:
    """All up to <|message|>, which is taken; Malformed, with something taken, where that does not come."""
    reader = parse.reader
    yield from reader.skip_space()
    tag = reader.take(1)
    header = yield from reader.until((MESSAGE,), MAX_HEADER_LEN)
    yield from reader.expect(MESSAGE)
    return tag + header
