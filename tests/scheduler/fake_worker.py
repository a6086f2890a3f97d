"""A second implementation of the worker's protocol: deterministic tokens, late answers, and no mercy for a wrong batch.

Its "KV cache" holds the token that was written to each slot, and its "model" hashes what it reads through the page
table. So a row's next token is a pure function of its tokens, unless a page was shared, freed or written wrongly.
It runs in-process (`FakeWorker.run_step`) and as a process with the links of a real one (`run`).
"""

import time
import zlib
from array import array
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from millstream.common.batch_messages import (
    NO_GRAMMAR,
    ROW_ERROR,
    ROW_GRAMMAR_ENDED,
    BatchResult,
    GrammarReady,
    NewReq,
    ScheduleBatch,
    StepAck,
)
from millstream.common.channel import Hub
from millstream.common.config import ChildConfig
from millstream.common.links import rank_to_scheduler, scheduler_to_rank
from millstream.common.logprobs import TokenLogprobs
from millstream.common.messages import KVGroup, LoadProgress, WorkerReady, pack_int32, unpack_int32

NUM_PAGES = 512
VOCAB_SIZE = 1000
CONTEXT_LEN = 2048
MAX_RUNNING_REQUESTS = 64
STEP_SECONDS = 0.002
WEIGHT_BYTES = 1000
GRAMMAR_LENGTH = 5
BAD_GRAMMAR = "bad"


def next_token(token_ids: "array[int]", vocab_size: int) -> int:
    """The model: a hash of all tokens so far."""
    return zlib.crc32(token_ids.tobytes()) % vocab_size


def sample(token_ids: "array[int]", vocab_size: int, masked: tuple[int, ...]) -> int:
    """The next token that is not masked."""
    token_id = next_token(token_ids, vocab_size)
    while token_id in masked:
        token_id = (token_id + 1) % vocab_size
    return token_id


def reference_outputs(
    prompt: list[int], vocab_size: int, max_new_tokens: int, ends: tuple[int, ...] = (), min_new_tokens: int = 0
) -> list[int]:
    """What a request gives alone: tokens up to and with the one that ends it."""
    token_ids, outputs = array("i", prompt), list[int]()
    while len(outputs) < max_new_tokens:
        outputs.append(sample(token_ids, vocab_size, ends if len(outputs) < min_new_tokens else ()))
        token_ids.append(outputs[-1])
        if outputs[-1] in ends:
            break
    return outputs


@dataclass
class Row:
    """What the worker knows of a row."""

    new_req: NewReq
    token_ids: "array[int]"
    page_ids: list[int] = field(default_factory=list)
    num_shared_pages: int = 0  # pages that were full before this row's first step: never written by it
    kv_len: int = 0
    error: str | None = None  # once failed, a row fails in every step until it is freed

    @property
    def has_ended(self) -> bool:
        """Whether the grammar of GRAMMAR_LENGTH tokens is complete."""
        num_outputs = len(self.token_ids) - self.new_req.prompt_len
        return self.new_req.grammar != NO_GRAMMAR and num_outputs >= GRAMMAR_LENGTH


class FakeWorker:
    """Applies batches in order, top to bottom; AssertionError for anything that a real worker could not do."""

    def __init__(
        self,
        *,
        num_pages: int = NUM_PAGES,
        page_size: int = 16,
        vocab_size: int = VOCAB_SIZE,
        max_running_requests: int = MAX_RUNNING_REQUESTS,
        failing_token_id: int | None = None,
        context_len: int = CONTEXT_LEN,
    ) -> None:
        self.context_len = context_len
        self.num_pages = num_pages
        self.page_size = page_size
        self.vocab_size = vocab_size
        self.max_running_requests = max_running_requests
        self.failing_token_id = failing_token_id  # a row that feeds this token fails
        self.rows: dict[int, Row] = {}
        self.generations: dict[int, int] = {}
        self.slots = array("i", [-1]) * (num_pages * page_size)
        self.next_step = 0
        self.grammars: dict[int, str] = {}
        self._ready: list[GrammarReady] = []

    def run_step(self, batch: ScheduleBatch) -> BatchResult | None:
        """Run one step; None where the batch has no rows to compute."""
        assert batch.step == self.next_step, f"step {batch.step} follows step {self.next_step - 1}"
        self.next_step += 1
        for row in unpack_int32(batch.freed_rows):
            assert row in self.rows, f"row {row} is freed and was not in use"
            del self.rows[row]
        for number in unpack_int32(batch.freed_grammars):
            del self.grammars[number]
        for number, grammar in batch.new_grammars.items():
            self._compile(number, grammar)
        for new_req in batch.new_reqs:
            self._add_row(new_req)
        self._add_pages(batch)
        columns = (unpack_int32(each) for each in (batch.extend_rows, batch.extend_starts, batch.extend_ends))
        extends = list(zip(*columns, strict=True))
        decodes = unpack_int32(batch.decode_rows)
        computed = [row for row, _, _ in extends] + decodes
        assert len(set(computed)) == len(computed), "a row is computed twice in one step"
        outcomes = [self._extend(*extend) for extend in extends]
        outcomes += [self._decode(row, batch.decode_width) for row in decodes]
        found = {row: self._prompt_logprobs(row, start, end) for row, start, end in extends}
        prompt_logprobs = {row: logprobs for row, logprobs in found.items() if logprobs is not None}
        return self._result(batch.step, computed, outcomes, prompt_logprobs) if computed else None

    def take_ready_grammars(self) -> list[GrammarReady]:
        """Grammars of earlier batches that can be used now, or never."""
        ready, self._ready = self._ready, []
        return ready

    def _compile(self, number: int, grammar: str) -> None:
        """Any text is a grammar that ends after GRAMMAR_LENGTH tokens, but for BAD_GRAMMAR."""
        assert number not in self.grammars, f"grammar {number} is announced twice"
        if grammar != BAD_GRAMMAR:
            self.grammars[number] = grammar
        self._ready.append(GrammarReady(number, "it is bad" if grammar == BAD_GRAMMAR else None))

    def _add_row(self, new_req: NewReq) -> None:
        row = new_req.row
        assert 0 <= row < self.max_running_requests
        assert row not in self.rows, f"row {row} is given out while it is in use"
        assert new_req.generation > self.generations.get(row, 0), "a row's generation is raised each time"
        self.generations[row] = new_req.generation
        token_ids = array("i", unpack_int32(new_req.input_ids))
        assert 0 < new_req.prompt_len <= len(token_ids)
        assert new_req.grammar in {NO_GRAMMAR, *self.grammars}, f"grammar {new_req.grammar} is not ready"
        self.rows[row] = Row(new_req, token_ids)
        if not all(0 <= token_id < self.vocab_size for token_id in token_ids):
            self.rows[row].error = "a token id is not in the vocabulary"

    def _add_pages(self, batch: ScheduleBatch) -> None:
        (columns,) = batch.new_pages
        page_ids = deque(unpack_int32(columns.page_ids))
        for row, count in zip(unpack_int32(columns.rows), unpack_int32(columns.counts), strict=True):
            new_page_ids = [page_ids.popleft() for _ in range(count)]
            assert all(0 <= page_id < self.num_pages for page_id in new_page_ids)
            self.rows[row].page_ids += new_page_ids
        assert not page_ids
        starts = dict(zip(unpack_int32(batch.extend_rows), unpack_int32(batch.extend_starts), strict=True))
        for new_req in batch.new_reqs:
            row = self.rows[new_req.row]
            assert starts[new_req.row] % self.page_size == 0, "a cached prefix is whole pages"
            row.kv_len = starts[new_req.row]
            row.num_shared_pages = row.kv_len // self.page_size
            assert new_req.pooling != "mean" or row.kv_len == 0, "a mean needs every state of the prompt"

    def _extend(self, index: int, start: int, end: int) -> tuple[list[int], str | None]:
        row = self.rows[index]
        if row.error:
            return [], row.error
        assert start == row.kv_len < end <= len(row.token_ids), f"row {index}: [{start}, {end}) after {row.kv_len}"
        assert end == len(row.token_ids) or end % self.page_size == 0, "chunks end on page boundaries"
        self._write(row, start, end)
        return self._sample(row) if end == len(row.token_ids) else ([], None)

    def _decode(self, index: int, width: int) -> tuple[list[int], str | None]:
        """One token, or with a width above 1 as many as a hash says: a draft is accepted now and then."""
        row = self.rows[index]
        if row.error:
            return [], row.error
        assert row.kv_len == len(row.token_ids) - 1, f"row {index} decodes before its prompt is computed"
        num_tokens = 1 + next_token(row.token_ids, width)
        num_slots = len(row.page_ids) * self.page_size
        assert row.kv_len + width <= num_slots, f"row {index} has no room for {width} tokens"
        new_ids: list[int] = []
        while len(new_ids) < num_tokens and len(row.token_ids) < self.context_len and not (new_ids and row.has_ended):
            self._write(row, row.kv_len, len(row.token_ids))
            sampled, error = self._sample(row)
            if error:
                return [], error
            new_ids += sampled
        return new_ids, None

    def _write(self, row: Row, start: int, end: int) -> None:
        others = {page_id for other in self.rows.values() if other is not row for page_id in other.page_ids}
        for position in range(start, end):
            page_index = position // self.page_size
            page_id = row.page_ids[page_index]
            assert page_index >= row.num_shared_pages, f"shared page {page_id} is written"
            assert page_id not in others, f"page {page_id} is written and another row has it"
            self.slots[page_id * self.page_size + position % self.page_size] = row.token_ids[position]
        row.kv_len = end

    def _num_used_pages(self, row: Row) -> int:
        return -(-row.kv_len // self.page_size)

    def _sample(self, row: Row) -> tuple[list[int], str | None]:
        if self.failing_token_id is not None and row.token_ids[-1] == self.failing_token_id:
            row.error = "not a number"
            return [], row.error
        params = row.new_req.sampling_params
        num_outputs = len(row.token_ids) - row.new_req.prompt_len
        masked = row.new_req.end_token_ids if num_outputs < params.min_new_tokens else ()
        token_id = sample(self._read(row), self.vocab_size, masked)
        row.token_ids.append(token_id)
        return [token_id], None

    def _read(self, row: Row) -> "array[int]":
        """What attention sees: the slots of the row's positions, through its page table."""
        seen = array("i")
        for page_id in row.page_ids[: self._num_used_pages(row)]:
            seen += self.slots[page_id * self.page_size : (page_id + 1) * self.page_size]
        return seen[: row.kv_len]

    def _prompt_logprobs(self, index: int, start: int, end: int) -> TokenLogprobs | None:
        """Of the tokens behind the prompt positions of a chunk."""
        new_req = self.rows[index].new_req
        if new_req.logprobs is None or self.rows[index].error:
            return None
        first, last = max(start, new_req.logprobs.start_len), min(end, new_req.prompt_len - 1)
        return self._logprobs_of(index, first + 1, last - first) if first < last else None

    def _logprobs_of(self, index: int, start: int, num_tokens: int) -> TokenLogprobs:
        token_ids = self.rows[index].token_ids
        positions = range(start, start + num_tokens)
        return TokenLogprobs(array("f", [logprob_of(token_ids[at], at) for at in positions]).tobytes())

    def _result(
        self,
        step: int,
        rows: list[int],
        outcomes: list[tuple[list[int], str | None]],
        prompt_logprobs: dict[int, TokenLogprobs],
    ) -> BatchResult:
        return BatchResult(
            step=step,
            rows=pack_int32(rows),
            generations=pack_int32([self.rows[row].new_req.generation for row in rows]),
            num_tokens=pack_int32([len(token_ids) for token_ids, _ in outcomes]),
            token_ids=pack_int32([token_id for token_ids, _ in outcomes for token_id in token_ids]),
            row_lens=pack_int32([len(self.rows[row].token_ids) for row in rows]),
            flags=pack_int32([self._flag(row, *outcome) for row, outcome in zip(rows, outcomes, strict=True)]),
            errors={row: error for row, (_, error) in zip(rows, outcomes, strict=True) if error},
            step_seconds=STEP_SECONDS,
            logprobs={
                row: self._logprobs_of(row, len(self.rows[row].token_ids) - len(token_ids), len(token_ids))
                for row, (token_ids, _) in zip(rows, outcomes, strict=True)
                if token_ids and self.rows[row].new_req.logprobs
            },
            prompt_logprobs=prompt_logprobs,
            embeddings={
                row: embedding_of(unpack_int32(self.rows[row].new_req.input_ids))
                for row, (token_ids, _) in zip(rows, outcomes, strict=True)
                if token_ids and self.rows[row].new_req.pooling
            },
        )

    def _flag(self, row: int, token_ids: list[int], error: str | None) -> int:
        ended = bool(token_ids) and self.rows[row].has_ended
        return ROW_ERROR if error else ROW_GRAMMAR_ENDED if ended else 0


def logprob_of(token_id: int, position: int) -> float:
    """That of a token at its position, a number that float32 has exactly."""
    return token_id + position / 1024


def embedding_of(prompt: list[int]) -> bytes:
    """The vector of a prompt."""
    return array("f", [zlib.crc32(pack_int32(prompt)), len(prompt)]).tobytes()


def run(config: ChildConfig) -> None:
    """The process, as `millstream.tests.scheduler.fake_worker:run`; a module of a test's own may call `serve`."""
    serve(config)


def serve(
    config: ChildConfig,
    *,
    step_seconds: float = STEP_SECONDS,
    num_pages: int = NUM_PAGES,
    vocab_size: int = VOCAB_SIZE,
) -> None:
    """Ready handshake, then a step for each batch: rank 0 answers, every rank acknowledges."""
    hub = Hub(Path(config.run_dir), config.instance_id)
    batches = hub.open_receiver(scheduler_to_rank(config.rank), ScheduleBatch)
    sender = hub.open_sender(rank_to_scheduler(config.rank))
    args = config.args
    worker = FakeWorker(
        num_pages=num_pages,
        page_size=args.page_size,
        vocab_size=vocab_size,
        max_running_requests=min(args.max_running_requests, 1024),
        context_len=args.context_length or CONTEXT_LEN,
    )
    sender.send(LoadProgress(config.rank, WEIGHT_BYTES // 2, WEIGHT_BYTES))
    sender.send(LoadProgress(config.rank, WEIGHT_BYTES, WEIGHT_BYTES))
    group = KVGroup("full", num_layers=1, page_bytes=args.page_size * 4, num_pages=num_pages)
    sender.send(
        WorkerReady(
            rank=config.rank,
            kv_groups=[group],
            vocab_size=worker.vocab_size,
            context_len=worker.context_len,
            max_running_requests=worker.max_running_requests,
            weight_bytes=WEIGHT_BYTES,
        )
    )
    while True:
        hub.wait()
        for batch in batches.drain():
            result = worker.run_step(batch)
            time.sleep(step_seconds)
            answers = [*([result] if result is not None else []), *worker.take_ready_grammars()]
            sender.send(*(answers if config.rank == 0 else []), StepAck(config.rank, batch.step))
