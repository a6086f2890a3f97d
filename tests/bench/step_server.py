"""A whole server under a load of decode steps: how long a step takes there, and how long the worker has none."""

import asyncio
import itertools
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

from millstream.scheduler.recording.recording import read_recording
from millstream.scheduler.simulation.recorded_steps import RecordedStep, read_steps
from millstream.tokenizer_manager.commands.bench_client import Load, Sample, run_load
from tests.bench.serving_servers import Slots, running


class ServerStep(NamedTuple):
    """Medians in seconds over the decode steps of full batches, and how many there were."""

    wall: float  # from result to result
    inside: float  # within the worker's step
    context_len: int  # of a row
    num_steps: int


def measure_server(batch: int, prompt_len: int, output_len: int, flags: tuple[str, ...]) -> ServerStep:
    """Start a server that records its schedule, and let `batch` streams run to their end."""
    with tempfile.TemporaryDirectory() as directory:
        recording = Path(directory, "schedule.jsonl")
        with running("ours", Slots(0, 0), (*flags, "--record-schedule", str(recording))) as server:
            load = Load(
                base_url=server.url,
                model="smollm2",
                num_prompts=batch,
                max_concurrency=batch,
                random_input_len=prompt_len,
                random_output_len=output_len,
                seed=1,
                num_warmups=1,
            )
            samples, _ = asyncio.run(run_load(load))
        _check(samples, output_len)
        recorded = read_recording(recording)
        steps = read_steps(recorded, recorded.header.config.max_running_requests).steps
    return full_steps(steps, batch)


def full_steps(steps: list[RecordedStep], batch: int) -> ServerStep:
    """Decode steps of all rows that follow one of the same kind."""
    is_full = [step.shape.kind == "decode" and step.shape.num_decode_rows == batch for step in steps]
    pairs = [
        (before, after)
        for (before, after), (was_full, is_full_too) in zip(
            itertools.pairwise(steps), itertools.pairwise(is_full), strict=True
        )
        if was_full and is_full_too
    ]
    if not pairs:
        raise SystemExit(f"no decode step had all {batch} rows: the outputs are too short")
    return ServerStep(
        wall=statistics.median(after.returned - before.returned for before, after in pairs),
        inside=statistics.median(after.seconds for _, after in pairs),
        context_len=round(statistics.median(after.shape.num_decode_kv_tokens for _, after in pairs) / batch),
        num_steps=len(pairs),
    )


def _check(samples: list[Sample], output_len: int) -> None:
    for sample in samples:
        assert not sample.error, sample.error
        assert sample.output_tokens == output_len
