"""From prompts to token ids, without holding up the event loop: short texts at once, long ones in a thread."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..common.tokenizer import Tokenizer, TokenizerError
from .api_error import bad_request, context_exceeded
from .chat.literal_text import LiteralText

INLINE_CHARS = 1000  # encoded in well under a millisecond
HUGE_CHARS = 256 * 2**10  # beyond which one call is done after the other: each takes memory a hundred times its text
TYPICAL_LONG_TOKEN = 16  # characters; texts with more for each token of the context are looked at twice

T = TypeVar("T")


class PromptEncoder:
    """The tokenizer, for an event loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._literal_text = LiteralText(tokenizer.special_texts)
        self._longest_token = 0  # in bytes; 0 until it is needed
        self._huge = asyncio.Semaphore(1)

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text; TokenizerError for a text that can not be encoded."""
        return await self._run(sum(map(len, texts)), lambda: self.tokenizer.encode_batch(texts, add_special_tokens))

    async def as_text(self, *values: Any) -> list[Any]:
        """The same messages, tools or arguments, with marks in special tokens: in a prompt of them they are text."""
        mark, is_short = self._literal_text.mark, sum(len(repr(value)) for value in values) <= INLINE_CHARS
        marked: list[Any] = mark(values) if is_short else await asyncio.to_thread(mark, values)
        return marked

    async def decode(self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        """The text of each sequence of ids."""

        def decode_all() -> list[str]:
            return [self.tokenizer.decode(ids, skip_special_tokens) for ids in sequences]

        return await self._run(sum(map(len, sequences)), decode_all)

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        """What `work` makes of so many characters or ids."""
        if size <= INLINE_CHARS:
            return work()
        if size <= HUGE_CHARS:
            return await asyncio.to_thread(work)
        await self._huge.acquire()
        task = asyncio.ensure_future(asyncio.to_thread(work))
        task.add_done_callback(lambda _: self._huge.release())
        return await asyncio.shield(task)  # a thread works on, also for a client that has left

    async def prompt_ids(
        self,
        prompts: Sequence[str | list[int]],
        param: str,
        *,
        vocab_size: int,
        context_len: int,
        add_special_tokens: bool = True,
    ) -> list[list[int]]:
        """Token ids of prompts that are texts or ids already; the APIError for a bad one names `param`."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for text in texts:
            await self._check_text(text, param, context_len)
        try:
            encoded = iter(await self.encode(texts, add_special_tokens=add_special_tokens) if texts else [])
        except TokenizerError as error:
            raise bad_request(f"{param}: {error}", param) from None
        sequences = [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]
        for ids in sequences:
            check_ids(ids, param, vocab_size)
            if len(ids) >= context_len:
                raise context_exceeded(context_len, f"{len(ids)} tokens", param)
        return sequences

    async def _check_text(self, text: str, param: str, context_len: int) -> None:
        """Refuse at once what is empty, or so long that no tokenizing could make it fit."""
        if not text:
            raise bad_request(f"{param} must not be empty", param, "empty_prompt")
        if len(text) < context_len * TYPICAL_LONG_TOKEN or self.tokenizer.token_bytes is None:
            return
        if not self._longest_token:
            self._longest_token = await asyncio.to_thread(self._find_longest_token)
        at_least = len(text) // self._longest_token
        if at_least >= context_len:
            raise context_exceeded(context_len, f"at least {at_least} tokens", param)

    def _find_longest_token(self) -> int:
        assert self.tokenizer.token_bytes is not None
        return max(1, *(len(self.tokenizer.token_bytes[token_id]) for token_id in range(self.tokenizer.vocab_size)))


def check_ids(ids: Sequence[int], param: str, vocab_size: int) -> None:
    """Raise the 400 for ids that are none, or outside the vocabulary."""
    if not ids:
        raise bad_request(f"{param} must not be empty", param, "empty_prompt")
    for wrong in (min(ids), max(ids)):
        if not 0 <= wrong < vocab_size:
            message = f"{param}: token id {wrong} is not in the vocabulary of {vocab_size}"
            raise bad_request(message, param, "token_out_of_range")
