"""One rank's side of a step: apply the batch, check it, run the decoder, sample, report. Knows no sockets."""

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from ..common.batch_messages import (
    ROW_ERROR,
    ROW_GRAMMAR_ENDED,
    ROW_REFUSED,
    BatchResult,
    GrammarReady,
    ScheduleBatch,
)
from ..common.logprobs import TokenLogprobs
from ..common.messages import pack_int32
from .communicator import Communicator
from .decoder import ForwardOutput
from .forward_batch import ForwardBatch
from .grammar import Grammars, Masks
from .logprobs import keep_logits, prompt_logprobs, prompt_parts, sampled_logprobs
from .pooling import pool, pooling_parts
from .rows import FREE, Int32Array, Int64Array, Limits, Rows
from .sampler import next_tokens
from .step import Step, build_forward_batch, read_step

FAILED_TOKEN = -1
NAN_MESSAGE = "the model's logits are NaN"
CONFLICT_MESSAGE = "the grammar, bad_words and min_tokens of the request together allow no token"


class Model(Protocol):
    """What a worker needs of the decoder."""

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Compute a step; the caller may change the logits."""

    def logits(self, hidden_NF: torch.Tensor) -> torch.Tensor | None:
        """Logits float32 [N, V] of hidden states on rank 0, None elsewhere; good until the next call."""


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step has made: the ids of the S rows that sample, and more of the rows that want it."""

    token_ids_S: Int64Array
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    embeddings: dict[int, bytes] = field(default_factory=dict)
    ended_rows: list[int] = field(default_factory=list)  # whose grammar allows nothing more
    refused_rows: list[int] = field(default_factory=list)  # whose request allows no token


class Worker:
    """Rows, model, grammars (where it samples) and communicator of one rank. Any exception from here must end the process."""

    def __init__(
        self,
        model: Model,
        communicator: Communicator,
        limits: Limits,
        device: torch.device,
        grammars: Grammars | None = None,
    ) -> None:
        self.grammars = grammars
        self.rows = Rows(limits, is_sampling=communicator.rank == 0)
        self._model = model
        self._communicator = communicator
        self._device = device

    @torch.inference_mode()
    def run_step(self, batch: ScheduleBatch) -> BatchResult | None:
        """Run one step. The result on rank 0; None on the others, and where the batch has no rows to compute."""
        start = time.monotonic()
        self.rows.apply(batch)
        if self.grammars is not None:
            self.grammars.apply(batch)
        step = read_step(self.rows, batch)
        computed = self._compute(step)
        if self._communicator.rank or not len(step.rows_N):
            return None
        return self._result(batch.step, step, computed, start)

    def take_ready_grammars(self) -> list[GrammarReady]:
        """Grammars of earlier batches that can be used now, or never."""
        return self.grammars.take_ready() if self.grammars is not None else []

    def _compute(self, step: Step) -> Computed:
        """Run the good rows, and update what is known of them."""
        rows, sampling = self.rows, step.sampling_rows_S
        if not len(step.rows_R):
            return Computed(np.empty(0, np.int64))
        parts, pooled = prompt_parts(rows, step), pooling_parts(rows, step)
        wanted = [*(part.indices for part in parts), *(part.indices for part in pooled)]
        masks = self.grammars.start_masks(sampling) if self.grammars is not None else None
        output = self._model.forward(build_forward_batch(rows, step, self._device, wanted))
        rows.kv_lens[step.rows_R] = step.ends_R
        computed = self._sample(sampling, output.logits_SV, masks)
        if output.hidden_NF is not None:
            num = sum(len(part.indices) for part in parts)
            if parts:
                computed.prompt_logprobs.update(prompt_logprobs(parts, output.hidden_NF[:num], self._model.logits))
            computed.embeddings.update(pool(rows, pooled, output.hidden_NF[num:]))
        for index in np.flatnonzero(computed.token_ids_S == FAILED_TOKEN).tolist():
            row = int(sampling[index])
            message, is_own_fault = self._why_no_token(row, output.logits_SV, index)
            rows.fail(row, message)
            step.errors[row] = rows.errors[row]
            if is_own_fault:
                computed.refused_rows.append(row)
        return computed

    def _why_no_token(self, row: int, logits_SV: torch.Tensor | None, index: int) -> tuple[str, bool]:
        """What rank 0 tells of it, and whether the request is the cause."""
        failed = self.grammars.failure(row) if self.grammars is not None else None
        if failed is not None:
            return failed.error, failed.is_too_expensive
        is_nan = logits_SV is None or bool(logits_SV[index].isnan().any())
        return (NAN_MESSAGE, False) if is_nan else (CONFLICT_MESSAGE, True)

    def _sample(
        self, sampling: Int32Array, logits_SV: torch.Tensor | None, filling: "Future[Masks] | None"
    ) -> Computed:
        """The next tokens of the rows that sample."""
        rows = self.rows
        if not len(sampling):
            return Computed(np.empty(0, np.int64))
        kept = keep_logits(rows, sampling.tolist(), logits_SV)
        masks = filling.result() if filling is not None else None
        token_ids_S = next_tokens(rows, sampling, logits_SV, masks, self._communicator, self._device)
        is_token_S = token_ids_S != FAILED_TOKEN
        rows.last_tokens[sampling] = token_ids_S
        rows.row_lens[sampling] += is_token_S
        found = sampled_logprobs(kept, token_ids_S) if kept is not None else ()
        ended = self.grammars.advance(sampling, token_ids_S) if self.grammars is not None else []
        return Computed(token_ids_S, {int(sampling[index]): logprobs for index, logprobs in found}, ended_rows=ended)

    def _result(self, number: int, step: Step, computed: Computed, start: float) -> BatchResult:
        token_ids_S = computed.token_ids_S
        num_rows = len(step.rows_N)
        num_tokens, flags = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
        num_tokens_R = step.is_sampling_R.astype(np.int32)
        num_tokens_R[step.is_sampling_R] = token_ids_S != FAILED_TOKEN
        num_tokens[step.is_good_N] = num_tokens_R
        generations, row_lens = self._known_columns(step)
        flagged = (
            (step.errors, ROW_ERROR),
            (computed.ended_rows, ROW_GRAMMAR_ENDED),
            (computed.refused_rows, ROW_REFUSED),
        )
        for which, flag in flagged:
            if which:
                flags[np.isin(step.rows_N, list(which))] |= flag
        return BatchResult(
            step=number,
            rows=step.rows_N.tobytes(),
            generations=generations,
            num_tokens=num_tokens.tobytes(),
            token_ids=pack_int32(token_ids_S[token_ids_S != FAILED_TOKEN].tolist()),
            row_lens=row_lens,
            flags=flags.tobytes(),
            errors=dict(step.errors),
            step_seconds=time.monotonic() - start,
            logprobs=computed.logprobs,
            prompt_logprobs=computed.prompt_logprobs,
            embeddings=computed.embeddings,
        )

    def _known_columns(self, step: Step) -> tuple[bytes, bytes]:
        """Generations and lengths of the step's rows, FREE and 0 for rows that nobody has."""
        num = self.rows.limits.max_rows
        in_range = (step.rows_N >= 0) & (step.rows_N < num)
        safe = np.where(in_range, step.rows_N, 0)
        generations = np.where(in_range, self.rows.generations[safe], FREE)
        row_lens = np.where(generations != FREE, self.rows.row_lens[safe], 0)
        return generations.astype(np.int32).tobytes(), row_lens.astype(np.int32).tobytes()
