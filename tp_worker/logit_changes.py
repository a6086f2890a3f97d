"""What requests change in their logits before sampling: penalties, bias, words and ends that are forbidden.

The state of rows on the rank that samples, and one call a step that applies it. Rows that use none of it cost nothing.
S rows that sample, P of them that a change concerns, M entries of a row, V vocabulary, K tokens before a bad word's last.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..common.batch_messages import NO_GRAMMAR, NewReq
from ..common.sampling_params import MAX_BAD_WORD_TOKENS, SamplingParams
from ..kernels.logits import PenaltyTensors, TokenLists, apply_logit_bias, apply_penalties
from .row_tokens import BoolArray, Int32Array, RowLists, RowTokens

TAIL_LEN = MAX_BAD_WORD_TOKENS - 1
ANY_TOKEN, NO_TOKEN = -1, -2
FORBIDDEN = float("-inf")

Float32Array = NDArray[np.float32]
Int64Array = NDArray[np.int64]


class LogitChanges:
    """Indexed by row. Counts and tails follow the tokens: `add_tokens` tells those that were sampled."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._has_penalty: BoolArray = np.zeros(max_rows, np.bool_)
        self._repetition: Float32Array = np.ones(max_rows, np.float32)
        self._frequency: Float32Array = np.zeros(max_rows, np.float32)
        self._presence: Float32Array = np.zeros(max_rows, np.float32)
        self._counts = RowTokens(max_rows, np.int32)  # distinct tokens, and how often each is in the output
        self._biases = RowTokens(max_rows, np.float32)
        self._bad_words = RowTokens(max_rows, np.int32, (TAIL_LEN,))  # last tokens, and those before, ANY_TOKEN first
        self._tails: Int32Array = np.zeros((max_rows, TAIL_LEN), np.int32)  # last tokens of rows with bad words
        self._end_tokens = RowTokens(max_rows, np.float32)
        self._unmasked_lens: Int32Array = np.zeros(max_rows, np.int32)  # from where end tokens are allowed

    def add(self, req: NewReq, input_ids: Int32Array) -> None:
        """A request gets its row, with what it knows: prompt, then outputs if it resumes."""
        row, params = req.row, req.sampling_params
        self._set_penalties(row, params, input_ids, req.prompt_len)
        self._biases.set(row, list(params.logit_bias), list(params.logit_bias.values()))
        self._set_bad_words(row, params.bad_words, input_ids)
        is_too_short = len(input_ids) < req.prompt_len + params.min_new_tokens
        is_masked = is_too_short and req.grammar == NO_GRAMMAR  # a grammar's own masks see to its ends
        self._unmasked_lens[row] = req.prompt_len + params.min_new_tokens
        end_ids = [i for i in req.end_token_ids if 0 <= i < self._vocab_size] if is_masked else []
        self._end_tokens.set(row, end_ids, FORBIDDEN)

    def free(self, row: int) -> None:
        """The row's request is gone."""
        self._has_penalty[row] = False
        for lists in (self._counts, self._biases, self._bad_words, self._end_tokens):
            lists.clear(row)

    def add_tokens(self, rows_S: Int32Array, token_ids_S: Int64Array) -> None:
        """The tokens that these rows have sampled."""
        has_penalty_S = self._has_penalty[rows_S]
        if has_penalty_S.any():
            self._counts.add_to_values(rows_S[has_penalty_S], token_ids_S[has_penalty_S])
        has_words_S = self._bad_words.lens[rows_S] > 0
        if has_words_S.any():
            rows_P = rows_S[has_words_S]
            self._tails[rows_P, :-1] = self._tails[rows_P, 1:]
            self._tails[rows_P, -1] = token_ids_S[has_words_S]

    def apply(self, rows_S: Int32Array, logits_SV: torch.Tensor) -> None:
        """Penalties, then bias, then bad words, in place."""
        if (counts := self._counts.read(rows_S)) is not None:
            self._penalise(rows_S, counts, logits_SV)
        if (biases := self._biases.read(rows_S)) is not None:
            _add_biases(logits_SV, biases, biases.values_PM)
        if (words := self._bad_words.read(rows_S)) is not None:
            self._forbid_bad_words(words, logits_SV)

    def forbid_ends(self, rows_S: Int32Array, row_lens_S: Int64Array, logits_SV: torch.Tensor) -> None:
        """The end tokens of rows that have not reached their `min_new_tokens`, in place."""
        is_too_short_S = row_lens_S < self._unmasked_lens[rows_S]
        if is_too_short_S.any() and (ends := self._end_tokens.read(rows_S, is_too_short_S)) is not None:
            _add_biases(logits_SV, ends, ends.values_PM)

    def _set_penalties(self, row: int, params: SamplingParams, input_ids: Int32Array, prompt_len: int) -> None:
        """Tokens of the prompt alone matter to the repetition penalty alone."""
        self._repetition[row] = params.repetition_penalty
        self._frequency[row] = params.frequency_penalty
        self._presence[row] = params.presence_penalty
        has_repetition = params.repetition_penalty != 1
        has_penalty = has_repetition or params.frequency_penalty != 0 or params.presence_penalty != 0
        self._has_penalty[row] = has_penalty
        if has_penalty:
            output_ids, counts = np.unique(input_ids[prompt_len:], return_counts=True)
            prompt_ids = np.setdiff1d(input_ids[:prompt_len], output_ids) if has_repetition else input_ids[:0]
            token_ids = np.concatenate((output_ids, prompt_ids))
            self._counts.set(row, token_ids, np.pad(counts, (0, len(prompt_ids))))

    def _set_bad_words(self, row: int, bad_words: tuple[tuple[int, ...], ...], input_ids: Int32Array) -> None:
        if not bad_words:
            return
        befores = np.full((len(bad_words), TAIL_LEN), ANY_TOKEN, np.int32)
        for before, word in zip(befores, bad_words, strict=True):
            before[TAIL_LEN - len(word) + 1 :] = word[:-1]
        self._bad_words.set(row, [word[-1] for word in bad_words], befores)
        tail = input_ids[-TAIL_LEN:]
        self._tails[row] = NO_TOKEN
        self._tails[row, TAIL_LEN - len(tail) :] = tail

    def _penalise(self, rows_S: Int32Array, counts: RowLists, logits_SV: torch.Tensor) -> None:
        columns = (self._repetition, self._frequency, self._presence)
        penalties = PenaltyTensors(*(_upload(column[rows_S], logits_SV) for column in columns))
        apply_penalties(logits_SV, _token_lists(counts, logits_SV), _upload(counts.values_PM, logits_SV), penalties)

    def _forbid_bad_words(self, words: RowLists, logits_SV: torch.Tensor) -> None:
        """The last token of each word whose other tokens are the row's last ones."""
        befores_PMK, tails_P1K = words.values_PM, self._tails[words.rows_P][:, None]
        is_there_PM = ((befores_PMK == ANY_TOKEN) | (befores_PMK == tails_P1K)).all(-1)
        _add_biases(logits_SV, words, np.where(is_there_PM, np.float32(FORBIDDEN), np.float32(0)))


def _add_biases(logits_SV: torch.Tensor, lists: RowLists, biases_PM: Float32Array) -> None:
    apply_logit_bias(logits_SV, _token_lists(lists, logits_SV), _upload(biases_PM, logits_SV))


def _token_lists(lists: RowLists, logits_SV: torch.Tensor) -> TokenLists:
    return TokenLists(*(_upload(column, logits_SV) for column in (lists.starts_S, lists.ends_S, lists.ids_PM)))


def _upload(array: NDArray[Any], logits_SV: torch.Tensor) -> torch.Tensor:
    """A flat tensor beside the logits."""
    return torch.from_numpy(array.ravel()).to(logits_SV.device)
