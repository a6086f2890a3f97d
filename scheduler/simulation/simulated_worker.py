"""The workers of a simulation: they answer every batch as real ones do, with the tokens and the time of a model.

A row ends its output with EOS_ID where the trace says so, which the scheduler learns from the result alone.
Array names carry shape letters: N rows of a step, S of them sample.
"""

import numpy as np

from ...common.batch_messages import BatchResult, ScheduleBatch
from .cost_model import StepCosts
from .step_shape import Int32Array, Int64Array, RowLengths
from .token_stream import token_ids
from .workload import SimulatedRequest

NEVER = 2**62


class SimulatedWorker:
    """All ranks as one. A request's rid is its index in the trace; EOS is the id after the vocabulary's last."""

    def __init__(self, costs: StepCosts, requests: list[SimulatedRequest], num_rows: int, vocab_size: int) -> None:
        self._costs = costs
        self._requests = requests
        self._vocab_size = vocab_size
        self.eos_id = vocab_size
        self._rows = RowLengths(num_rows)
        self._generations = np.zeros(num_rows, np.int32)
        self._streams = np.zeros(num_rows, np.uint64)
        self._prompt_lens = np.zeros(num_rows, np.int64)
        self._last_lens = np.full(num_rows, NEVER, np.int64)  # the length of a row that has all of its output
        self._recorded: dict[int, bytes] = {}  # row -> the ids of its output

    def run_step(self, batch: ScheduleBatch) -> BatchResult | None:
        """The result of a step, whose `step_seconds` are the model's; None where it has no rows to compute."""
        for new_req in batch.new_reqs:
            self._add_row(new_req.row, new_req.generation, int(new_req.rid), new_req.prompt_len)
        plan = self._rows.begin(batch)
        rows_N = plan.rows_N
        if not len(rows_N):
            return None
        lens_N = self._rows.lens[rows_N] + plan.samples_N
        all_sample = plan.shape.num_samples == len(rows_N)
        rows_S, lens_S = (rows_N, lens_N) if all_sample else (rows_N[plan.samples_N], lens_N[plan.samples_N])
        self._rows.end(rows_N, lens_N)
        return BatchResult(
            step=batch.step,
            rows=rows_N.tobytes(),
            generations=self._generations[rows_N].tobytes(),
            num_tokens=plan.samples_N.astype(np.int32).tobytes(),
            token_ids=self._sample(rows_S, lens_S),
            row_lens=lens_N.astype(np.int32).tobytes(),
            flags=bytes(4 * len(rows_N)),
            errors={},
            step_seconds=self._costs.seconds(plan.shape),
        )

    def _add_row(self, row: int, generation: int, index: int, prompt_len: int) -> None:
        request = self._requests[index]
        self._generations[row] = generation
        self._streams[row] = request.output_stream
        self._prompt_lens[row] = prompt_len
        self._last_lens[row] = NEVER if request.ignore_eos else prompt_len + request.output_len
        if request.output_ids:
            self._recorded[row] = request.output_ids
        else:
            self._recorded.pop(row, None)

    def _sample(self, rows_S: Int32Array, lens_S: Int64Array) -> bytes:
        """The last token of each row, of the length that it has now."""
        positions_S = lens_S - self._prompt_lens[rows_S] - 1
        ids_S = token_ids(self._streams[rows_S], positions_S.astype(np.uint64), self._vocab_size)
        if self._recorded:
            for i, row in enumerate(rows_S.tolist()):
                recorded, start = self._recorded.get(row, b""), 4 * int(positions_S[i])
                if start < len(recorded):
                    ids_S[i] = np.frombuffer(recorded, np.int32, 1, start)[0]
        ids_S[lens_S == self._last_lens[rows_S]] = self.eos_id
        return ids_S.tobytes()
