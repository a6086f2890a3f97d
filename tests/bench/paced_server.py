"""`millstream serve` with a worker that sleeps where a model would compute: everything else is real, and has the cores.

`PACED_STEP_MS=6 python -m tests.bench.paced_server ARGS`: a step takes 6 ms, and 0.06 ms more for each prompt token.
"""

import os
import random
import sys
import time
from pathlib import Path

from millstream.common.batch_messages import BatchResult, ScheduleBatch, StepAck
from millstream.common.channel import Hub
from millstream.common.config import ChildConfig
from millstream.common.links import rank_to_scheduler, scheduler_to_rank
from millstream.common.messages import KVGroup, LoadProgress, WorkerReady, pack_int32, unpack_int32
from millstream.common.settings import read_settings
from millstream.tokenizer_manager.children import Entries
from millstream.tokenizer_manager.port import bind_port
from millstream.tokenizer_manager.server import serve

STEP_MS = "PACED_STEP_MS"
PROMPT_TOKEN_SECONDS = 60e-6
NUM_PAGES = 32768
VOCAB_SIZE, CONTEXT_LEN = 49152, 8192  # of the packaged model
TOKEN_IDS = range(300, 40000)  # pieces of text


class PacedWorker:
    """Knows of each row what a result must say, and draws its tokens."""

    def __init__(self) -> None:
        self._random = random.Random(1)
        self._generations: dict[int, int] = {}
        self._lens: dict[int, int] = {}

    def answer(self, batch: ScheduleBatch, step_seconds: float) -> tuple[BatchResult | None, float]:
        """The result, None where there are no rows to compute; and how long it takes, in seconds."""
        for new_req in batch.new_reqs:
            self._generations[new_req.row] = new_req.generation
            self._lens[new_req.row] = len(new_req.input_ids) // 4
        extends, starts, ends = map(unpack_int32, (batch.extend_rows, batch.extend_starts, batch.extend_ends))
        decodes = unpack_int32(batch.decode_rows)
        rows = extends + decodes
        counts = [int(end == self._lens[row]) for row, end in zip(extends, ends, strict=True)] + [1] * len(decodes)
        for row, count in zip(rows, counts, strict=True):
            self._lens[row] += count
        seconds = step_seconds + PROMPT_TOKEN_SECONDS * (sum(ends) - sum(starts))
        result = BatchResult(
            step=batch.step,
            rows=pack_int32(rows),
            generations=pack_int32([self._generations[row] for row in rows]),
            num_tokens=pack_int32(counts),
            token_ids=pack_int32(self._random.choices(TOKEN_IDS, k=sum(counts))),
            row_lens=pack_int32([self._lens[row] for row in rows]),
            flags=bytes(4 * len(rows)),
            errors={},
            step_seconds=seconds,
        )
        return (result, seconds) if rows else (None, 0.0)


def run_worker(config: ChildConfig) -> None:
    """The process: a step for each batch."""
    step_seconds = float(os.environ[STEP_MS]) / 1000
    hub = Hub(Path(config.run_dir), config.instance_id)
    batches = hub.open_receiver(scheduler_to_rank(0), ScheduleBatch)
    sender = hub.open_sender(rank_to_scheduler(0))
    group = KVGroup("full", num_layers=1, page_bytes=64, num_pages=NUM_PAGES)
    sender.send(LoadProgress(0, 1, 1))
    sender.send(WorkerReady(0, [group], VOCAB_SIZE, CONTEXT_LEN, config.args.max_running_requests, 1))
    worker = PacedWorker()
    while True:
        hub.wait()
        for batch in batches.drain():
            started = time.monotonic()
            result, seconds = worker.answer(batch, step_seconds)
            time.sleep(max(0.0, seconds - (time.monotonic() - started)))
            sender.send(*([] if result is None else [result]), StepAck(0, batch.step))


if __name__ == "__main__":
    settings = read_settings(sys.argv[1:], {})
    sys.exit(
        serve(
            settings,
            bind_port(settings.args.host, settings.args.port),
            Entries(tp_worker="tests.bench.paced_server:run_worker"),
        )
    )
