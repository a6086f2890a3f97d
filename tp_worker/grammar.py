"""Grammars on the rank that samples: which tokens may come next, so that an output follows its request's grammar.

A grammar is compiled in a thread while steps go on, and each row that follows it gets a matcher, rolled forward over the
row's outputs. Masks are filled in another thread while the forward pass runs. A matcher that fails allows nothing from
then on, so its row has no token and ends in an error, on all ranks alike: it never lets a token pass that it has not
allowed. S rows that sample, M of them under a mask, W words of 32 tokens.
"""

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from ..common.batch_messages import NO_GRAMMAR, GrammarReady, NewReq, ScheduleBatch
from ..common.grammar_tokenizer import make_grammar_tokenizer, parser_limits
from ..common.tokenizer import Tokenizer
from ..kernels.logits import BITS, apply_token_bitmask
from .row_tokens import Int32Array
from .rows import BatchError, Int64Array, read_int32

NO_MASK = -1
MAX_THREADS = 8
NOT_ALLOWED = "doesn't satisfy the grammar"  # as llguidance says it; its other errors are limits

logger = logging.getLogger(__name__)


class Masks(NamedTuple):
    """Row S obeys bitmask_MW[mask_of_S[s]] (int32), none where that is NO_MASK."""

    bitmask_MW: Int32Array
    mask_of_S: Int32Array

    def apply(self, logits_SV: torch.Tensor) -> None:
        """Forbid what the masks forbid, in place."""
        columns = (torch.from_numpy(column).to(logits_SV.device) for column in self)
        apply_token_bitmask(logits_SV, *columns)


class RowGrammar:
    """How one row follows its grammar. `error` says why it can't any more."""

    def __init__(self, matcher: LLMatcher, req: NewReq, eos_words: "EndWords") -> None:
        self.matcher = matcher
        self.error = ""
        self.is_too_expensive = False
        self._eos_words = eos_words if req.sampling_params.ignore_eos else None
        self._end_words = EndWords(req.end_token_ids) if req.sampling_params.min_new_tokens else None
        outputs = read_int32(req.input_ids)[req.prompt_len :].tolist()
        self._num_left_to_min = req.sampling_params.min_new_tokens - len(outputs)
        if not matcher.is_error() and matcher.try_consume_tokens(outputs) == len(outputs):
            return
        if matcher.is_error():
            self.fail_as_matcher()
        else:
            self.fail("the outputs do not follow the grammar")

    @property
    def has_ended(self) -> bool:
        """Whether nothing may follow; what a step in flight samples beyond that is dropped by the scheduler."""
        return not self.error and self.matcher.is_stopped() and not self.matcher.is_error()

    def fail(self, message: str) -> None:
        """No token is allowed from now on."""
        self.error = f"the grammar failed: {message}"

    def fail_as_matcher(self) -> None:
        """No token is allowed from now on, for the matcher's reason."""
        message = self.matcher.get_error()
        self.is_too_expensive = NOT_ALLOWED not in message
        self.fail(message.splitlines()[0] if message else "unknown error")

    def advance(self, token_id: int) -> None:
        """The token that was sampled under the last mask."""
        self._num_left_to_min -= 1
        if not self.has_ended and not self.error and not self.matcher.consume_token(token_id):
            self.fail_as_matcher()

    def finish_mask(self, mask_W: Int32Array) -> None:
        """A mask as the matcher filled it: nothing after an error, and no end that the request does not want yet."""
        if self.matcher.is_error():
            self.fail_as_matcher()
            mask_W[:] = 0
            return
        if self._eos_words is not None:
            self._eos_words.clear(mask_W)
        if self._end_words is not None and self._num_left_to_min > 0:
            self._end_words.clear(mask_W)


class EndWords:
    """The bits of tokens that end a request."""

    def __init__(self, token_ids: Iterable[int]) -> None:
        bits: dict[int, int] = {}
        for token_id in token_ids:
            bits[token_id // BITS] = bits.get(token_id // BITS, 0) | 1 << token_id % BITS
        self._words = np.array(list(bits), np.int64)
        self._kept = ~np.array(list(bits.values()), np.uint32).view(np.int32)

    def clear(self, mask_W: Int32Array) -> None:
        """Forbid them, unless nothing else is allowed: the end of the grammar wins."""
        is_there = self._words < len(mask_W)  # a tokenizer may have ids that the model has no logits for
        words, kept = self._words[is_there], self._kept[is_there]
        before = mask_W[words]
        mask_W[words] &= kept
        if not mask_W.any():
            mask_W[words] = before


class Grammars:
    """Compiled grammars by their numbers, and the rows that follow one. Steps without such rows cost nothing.

    `load_tokenizer` is called once, in the compiling thread; `wake` ends the wait of the loop that sends
    `take_ready`'s messages.
    """

    def __init__(self, vocab_size: int, load_tokenizer: Callable[[], Tokenizer], num_threads: int) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._vocab_size = vocab_size
        self._load_tokenizer = load_tokenizer
        self._num_threads = max(1, min(MAX_THREADS, num_threads))
        self._tokenizer: LLTokenizer | None = None
        self._compiled: dict[int, LLMatcher] = {}
        self._ready: SimpleQueue[GrammarReady] = SimpleQueue()
        self._rows: dict[int, RowGrammar] = {}
        self._compiler = ThreadPoolExecutor(1, "grammar-compiler")
        self._filler = ThreadPoolExecutor(1, "grammar-masks")
        self._executor: LLExecutor | None = None
        self._eos_words = EndWords(())

    def apply(self, batch: ScheduleBatch) -> None:
        """The changes of a batch, in the order of Rows.apply."""
        for number in read_int32(batch.freed_grammars).tolist():
            if self._compiled.pop(number, None) is None:
                raise BatchError(f"grammar {number} is freed, which is not ready")
        for number, grammar in batch.new_grammars.items():
            self._compiler.submit(self._compile, number, grammar)
        if self._rows:
            for row in read_int32(batch.freed_rows).tolist():
                self._rows.pop(row, None)
        for req in batch.new_reqs:
            if req.grammar != NO_GRAMMAR:
                self._rows[req.row] = RowGrammar(self._new_matcher(req), req, self._eos_words)

    def take_ready(self) -> list[GrammarReady]:
        """What the compiling thread has finished since the last call."""
        return [self._ready.get() for _ in range(self._ready.qsize())]

    def start_masks(self, rows_S: Int32Array) -> "Future[Masks] | None":
        """Fill the masks of these rows in a thread; None where none of them follows a grammar."""
        if not self._rows:
            return None
        found = [(index, self._rows[row]) for index, row in enumerate(rows_S.tolist()) if row in self._rows]
        found = [(index, each) for index, each in found if not each.has_ended]
        return self._filler.submit(self._fill, found, len(rows_S)) if found else None

    def advance(self, rows_S: Int32Array, token_ids_S: Int64Array) -> list[int]:
        """Roll forward over the tokens that these rows have sampled; which of them have ended."""
        ended = []
        for row, token_id in zip(rows_S.tolist(), token_ids_S.tolist(), strict=True) if self._rows else ():
            grammar = self._rows.get(row)
            if grammar is not None and token_id >= 0:
                grammar.advance(token_id)
                if grammar.has_ended:
                    ended.append(row)
        return ended

    def failure(self, row: int) -> RowGrammar | None:
        """The row's grammar, if it has failed."""
        grammar = self._rows.get(row)
        return grammar if grammar is not None and grammar.error else None

    def close(self) -> None:
        """End the threads."""
        self._compiler.shutdown(cancel_futures=True)
        self._filler.shutdown()

    def _new_matcher(self, req: NewReq) -> LLMatcher:
        compiled = self._compiled.get(req.grammar)
        if compiled is None:
            raise BatchError(f"request {req.rid} follows grammar {req.grammar}, which is not ready")
        return compiled.deep_copy()

    def _compile(self, number: int, grammar: str) -> None:
        """In the compiling thread."""
        try:
            matcher = LLMatcher(self._tokenizer_of_model(), grammar, log_level=0, limits=parser_limits())
            error = matcher.get_error().splitlines()[0] if matcher.is_error() else None
        except BaseException as failure:
            logger.exception("grammar %d could not be compiled", number)
            error = f"{type(failure).__name__}: {failure}"
        else:
            if error is None:
                self._compiled[number] = matcher
        self._ready.put(GrammarReady(number, error))
        self.wake()

    def _tokenizer_of_model(self) -> LLTokenizer:
        if self._tokenizer is None:
            tokenizer = self._load_tokenizer()
            self._tokenizer = make_grammar_tokenizer(tokenizer, self._vocab_size)
            self._eos_words = EndWords(tokenizer.eos_token_ids)
        return self._tokenizer

    def _fill(self, found: list[tuple[int, RowGrammar]], num_rows: int) -> Masks:
        """In the mask thread."""
        mask_of_S = np.full(num_rows, NO_MASK, np.int32)
        mask_of_S[[index for index, _ in found]] = np.arange(len(found))
        bitmask_MW = np.zeros((len(found), -(-self._vocab_size // BITS)), np.int32)
        row_bytes = bitmask_MW.strides[0]
        self._executor = self._executor or LLExecutor(self._num_threads)
        good = [(each.matcher, place) for place, (_, each) in enumerate(found) if not each.error]
        if good:  # llguidance takes no empty list
            self._executor.unsafe_compute_mask_ptr(good, bitmask_MW.ctypes.data, row_bytes, len(found))
        for mask_W, (_, each) in zip(bitmask_MW, found, strict=True):
            if not each.error:
                each.finish_mask(mask_W)
        return Masks(bitmask_MW, mask_of_S)
