"""One rank's side of a step: apply the batch, check it, run the decoder, sample, report. Knows no sockets."""

import time
from typing import Protocol

import numpy as np
import torch

from ..common.batch_messages import ROW_ERROR, BatchResult, ScheduleBatch
from ..common.messages import pack_int32
from .communicator import Communicator
from .forward_batch import ForwardBatch
from .rows import FREE, Int64Array, Limits, Rows
from .sampler import next_tokens
from .step import Step, build_forward_batch, read_step

FAILED_TOKEN = -1
NO_TOKEN_MESSAGE = "the model's logits allow no token (NaN or all forbidden)"  # noqa: S105 - not a secret


class Model(Protocol):
    """What a worker needs of the decoder."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Logits float32 [S, V] on rank 0, None elsewhere; good until the next call, and the caller may change them."""


class Worker:
    """Rows, model and communicator of one rank. Any exception from here must end the process."""

    def __init__(self, model: Model, communicator: Communicator, limits: Limits, device: torch.device) -> None:
        self.rows = Rows(limits)
        self._model = model
        self._communicator = communicator
        self._device = device

    @torch.inference_mode()
    def run_step(self, batch: ScheduleBatch) -> BatchResult | None:
        """Run one step. The result on rank 0; None on the others, and where the batch has no rows to compute."""
        start = time.monotonic()
        self.rows.apply(batch)
        step = read_step(self.rows, batch)
        token_ids_S = self._compute(step)
        if self._communicator.rank or not len(step.rows_N):
            return None
        return self._result(batch.step, step, token_ids_S, start)

    def _compute(self, step: Step) -> Int64Array:
        """Run the good rows; ids of the tokens that they sampled. Updates what is known of the rows."""
        rows, sampling = self.rows, step.sampling_rows_S
        token_ids_S = np.empty(0, np.int64)
        if len(step.rows_R):
            logits_SV = self._model.forward(build_forward_batch(rows, step, self._device))
            rows.kv_lens[step.rows_R] = step.ends_R
            if len(sampling):
                token_ids_S = next_tokens(rows, sampling, logits_SV, self._communicator, self._device)
        is_token_S = token_ids_S != FAILED_TOKEN
        rows.last_tokens[sampling] = token_ids_S
        rows.row_lens[sampling] += is_token_S
        for row in sampling[~is_token_S].tolist():
            rows.fail(row, NO_TOKEN_MESSAGE)
            step.errors[row] = NO_TOKEN_MESSAGE
        return token_ids_S

    def _result(self, number: int, step: Step, token_ids_S: Int64Array, start: float) -> BatchResult:
        num_rows = len(step.rows_N)
        num_tokens, flags = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
        num_tokens_R = step.is_sampling_R.astype(np.int32)
        num_tokens_R[step.is_sampling_R] = token_ids_S != FAILED_TOKEN
        num_tokens[step.is_good_N] = num_tokens_R
        generations, row_lens = self._known_columns(step)
        if step.errors:
            flags[[row in step.errors for row in step.rows_N.tolist()]] = ROW_ERROR
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
        )

    def _known_columns(self, step: Step) -> tuple[bytes, bytes]:
        """Generations and lengths of the step's rows, FREE and 0 for rows that nobody has."""
        num = self.rows.limits.max_rows
        in_range = (step.rows_N >= 0) & (step.rows_N < num)
        safe = np.where(in_range, step.rows_N, 0)
        generations = np.where(in_range, self.rows.generations[safe], FREE)
        row_lens = np.where(generations != FREE, self.rows.row_lens[safe], 0)
        return generations.astype(np.int32).tobytes(), row_lens.astype(np.int32).tobytes()
