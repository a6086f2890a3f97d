"""Drives a Worker the way the scheduler does, step by step and in full view of the test."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from millstream.common.batch_messages import BatchResult, NewReq, PageColumns, ScheduleBatch
from millstream.common.config import ChildConfig, ServerArgs
from millstream.common.messages import pack_int32, unpack_int32
from millstream.common.sampling_params import SamplingParams
from millstream.tp_worker.load import load_worker
from millstream.tp_worker.worker import Worker

GREEDY = SamplingParams(temperature=0.0, seed=0)
TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_tiny_model(folder: Path) -> Path:
    """A config of a tiny Llama, for `--load-format dummy`."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    return folder


def tiny_args(folder: Path, **changes: Any) -> ServerArgs:
    """Flags that serve the tiny model in float32, in a small cache."""
    flags: dict[str, Any] = {
        "model_path": str(folder),
        "load_format": "dummy",
        "dtype": "float32",
        "device": "cpu",
        "page_size": 4,
        "max_total_tokens": 2048,
        "max_running_requests": 40,
        "random_seed": 7,
    }
    return ServerArgs(**{**flags, **changes})


def load_tiny_worker(args: ServerArgs, rank: int = 0, memory: int = -1, run_dir: str = "") -> Worker:
    """A rank's worker, ready."""
    config = ChildConfig(
        name=f"tp_worker.{rank}",
        rank=rank,
        run_dir=run_dir,
        instance_id=0,
        args=args,
        shared_memory_fd=memory,
    )
    worker = load_worker(config, lambda loaded, total: None)[0]
    torch.set_num_threads(1)
    return worker


@dataclass
class Outcome:
    """A result by row."""

    tokens: dict[int, list[int]]
    row_lens: dict[int, int]
    errors: dict[int, str]


@dataclass
class Driver:
    """Hands out rows' pages in order, and keeps what goes with the next step."""

    worker: Worker
    next_step: int = 0
    freed: list[int] = field(default_factory=list)
    new_reqs: list[NewReq] = field(default_factory=list)
    pages: dict[int, list[int]] = field(default_factory=dict)
    free_pages: list[int] | None = None

    def add(
        self,
        row: int,
        input_ids: list[int],
        params: SamplingParams = GREEDY,
        *,
        generation: int = 1,
        prompt_len: int | None = None,
        end_token_ids: tuple[int, ...] = (),
        **wanted: Any,
    ) -> None:
        """A request gets a row with the next step; `wanted` are the other fields of NewReq."""
        known = len(input_ids) if prompt_len is None else prompt_len
        ids = pack_int32(input_ids)
        self.new_reqs.append(NewReq(row, generation, f"rid-{row}", ids, known, params, end_token_ids, **wanted))
        self.pages[row] = []

    def free(self, row: int) -> None:
        """The row and its pages come back with the next step."""
        self.freed.append(row)
        self._free_pages().extend(self.pages.pop(row))

    def step(self, extends: dict[int, range] | None = None, decodes: list[int] | None = None) -> BatchResult | None:
        """Compute ranges of new rows, and the next token of known ones."""
        result = self.worker.run_step(self.batch(extends, decodes))
        self.next_step += 1
        return result

    def batch(self, extends: dict[int, range] | None = None, decodes: list[int] | None = None) -> ScheduleBatch:
        """The message of a step, with the pages that it needs."""
        extends, decodes = extends or {}, decodes or []
        ends = {row: span.stop for row, span in extends.items()}
        ends |= {row: int(self.worker.rows.row_lens[row]) for row in decodes if row in self.pages}
        new_pages = {row: self._grow(row, end) for row, end in ends.items() if row in self.pages}
        freed, self.freed = self.freed, []
        new_reqs, self.new_reqs = self.new_reqs, []
        return ScheduleBatch(
            step=self.next_step,
            freed_rows=pack_int32(freed),
            new_reqs=new_reqs,
            new_pages=[
                PageColumns(
                    pack_int32(new_pages),
                    pack_int32(len(ids) for ids in new_pages.values()),
                    pack_int32(page_id for ids in new_pages.values() for page_id in ids),
                )
            ],
            extend_rows=pack_int32(extends),
            extend_starts=pack_int32(span.start for span in extends.values()),
            extend_ends=pack_int32(span.stop for span in extends.values()),
            decode_rows=pack_int32(decodes),
        )

    def generate(self, rows: dict[int, int], num_tokens: int) -> dict[int, list[int]]:
        """Prefill new rows (row -> prompt length) whole, then decode all of them; their output tokens."""
        outputs = read(self.step({row: range(length) for row, length in rows.items()})).tokens
        for _ in range(num_tokens - 1):
            for row, tokens in read(self.step(decodes=list(rows))).tokens.items():
                outputs[row] += tokens
        return outputs

    def _grow(self, row: int, end: int) -> list[int]:
        missing = -(-end // self.worker.rows.limits.page_size) - len(self.pages[row])
        new = [self._free_pages().pop() for _ in range(missing)]
        self.pages[row] += new
        return new

    def _free_pages(self) -> list[int]:
        if self.free_pages is None:
            self.free_pages = list(range(self.worker.rows.limits.num_pages))[::-1]
        return self.free_pages


def read(result: BatchResult | None) -> Outcome:
    """A result of rank 0, by row; its columns must fit together."""
    assert result is not None
    rows, counts, ids = map(unpack_int32, (result.rows, result.num_tokens, result.token_ids))
    lens = unpack_int32(result.row_lens)
    assert len(rows) == len(counts) == len(lens) == len(unpack_int32(result.flags))
    assert sum(counts) == len(ids)
    tokens = {}
    for row, count in zip(rows, counts, strict=True):
        tokens[row], ids = ids[:count], ids[count:]
    return Outcome(tokens, dict(zip(rows, lens, strict=True)), result.errors)
