"""What every worker must do with a stream of `ScheduleBatch`es: the real one and the fake one run the same checks.

`check_worker_contract(make_worker)` calls `make_worker()` for a fresh `WorkerUnderTest` before each check. A worker's
tokens must be a function of the tokens before them: a small float32 model, greedy, will do.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from millstream.common.batch_messages import ROW_ERROR, BatchResult, NewReq, PageColumns, ScheduleBatch
from millstream.common.messages import pack_int32, unpack_int32
from millstream.common.sampling_params import SamplingParams

PROMPT = [5, 9, 2, 7, 7, 1, 3, 8, 6, 4, 2, 5, 9, 9, 1, 6, 2, 3, 4, 8, 1]


@dataclass(frozen=True)
class WorkerUnderTest:
    """Rank 0 of a fresh worker: at least 4 rows, 12 pages for each 4 pages of PROMPT, 10 token ids."""

    run_step: Callable[[ScheduleBatch], BatchResult | None]
    page_size: int
    num_pages: int
    vocab_size: int


@dataclass
class Stream:
    """Writes the batches: pages are handed out from the last to the first, so that no table is in order."""

    worker: WorkerUnderTest
    step: int = 0
    new_reqs: list[NewReq] = field(default_factory=list)
    freed_rows: list[int] = field(default_factory=list)
    tables: dict[int, list[int]] = field(default_factory=dict)
    lens: dict[int, int] = field(default_factory=dict)
    generations: dict[int, int] = field(default_factory=dict)
    num_given: int = 0

    def add(
        self, row: int, token_ids: list[int], *, prompt_len: int = 0, ends: tuple[int, ...] = (), **params: Any
    ) -> None:
        """Give a row to a request, with the next step."""
        self.generations[row] = self.generations.get(row, 0) + 1
        sampling_params = SamplingParams(temperature=0.0, seed=0, **params)
        self.new_reqs.append(
            NewReq(
                row=row,
                generation=self.generations[row],
                rid=f"r{row}",
                input_ids=pack_int32(token_ids),
                prompt_len=prompt_len or len(token_ids),
                sampling_params=sampling_params,
                end_token_ids=ends,
            )
        )
        self.tables[row] = []
        self.lens[row] = len(token_ids)

    def run(
        self,
        extends: dict[int, range] | None = None,
        decodes: list[int] | None = None,
        shared: dict[int, list[int]] | None = None,
    ) -> dict[int, list[int]]:
        """Run a step; checks the frame of the result and returns the tokens by row. `shared`: cached pages of new rows."""
        extends, decodes = extends or {}, decodes or []
        ends = {row: span.stop for row, span in extends.items()} | {row: self.lens[row] for row in decodes}
        pages = {row: self._grow(row, end, (shared or {}).get(row, [])) for row, end in ends.items()}
        batch = ScheduleBatch(
            step=self.step,
            freed_rows=pack_int32(self.freed_rows),
            new_reqs=self.new_reqs,
            new_pages=[
                PageColumns(
                    pack_int32(pages),
                    pack_int32([len(page_ids) for page_ids in pages.values()]),
                    pack_int32([page_id for page_ids in pages.values() for page_id in page_ids]),
                )
            ],
            extend_rows=pack_int32(extends),
            extend_starts=pack_int32([span.start for span in extends.values()]),
            extend_ends=pack_int32([span.stop for span in extends.values()]),
            decode_rows=pack_int32(decodes),
        )
        self.step, self.new_reqs, self.freed_rows = self.step + 1, [], []
        self.errors: dict[int, str] = {}
        result = self.worker.run_step(batch)
        if result is None:
            assert not ends, "a step with rows has a result"
            return {}
        return self._read(result, batch.step, [*extends, *decodes])

    def generate(self, row: int, token_ids: list[int], num_tokens: int) -> list[int]:
        """The tokens of a request alone: its prompt whole, then token by token."""
        self.add(row, token_ids)
        outputs = self.run({row: range(len(token_ids))})[row]
        while len(outputs) < num_tokens:
            outputs += self.run(decodes=[row])[row]
        return outputs

    def _grow(self, row: int, end: int, shared: list[int]) -> list[int]:
        num_missing = -(-end // self.worker.page_size) - len(self.tables[row]) - len(shared)
        first = self.worker.num_pages - self.num_given - 1
        page_ids = [*shared, *range(first, first - num_missing, -1)]
        self.num_given += num_missing
        self.tables[row] += page_ids
        return page_ids

    def _read(self, result: BatchResult, step: int, rows: list[int]) -> dict[int, list[int]]:
        assert result.step == step
        assert unpack_int32(result.rows) == rows, "extend rows, then decode rows"
        assert unpack_int32(result.generations) == [self.generations[row] for row in rows]
        counts, token_ids = unpack_int32(result.num_tokens), unpack_int32(result.token_ids)
        tokens: dict[int, list[int]] = {}
        for row, count in zip(rows, counts, strict=True):
            tokens[row], token_ids = token_ids[:count], token_ids[count:]
        assert not token_ids
        flags = unpack_int32(result.flags)
        self.errors = {row: result.errors[row] for row, flag in zip(rows, flags, strict=True) if flag & ROW_ERROR}
        assert set(result.errors) == set(self.errors)
        for row, row_len in zip(rows, unpack_int32(result.row_lens), strict=True):
            self.lens[row] += len(tokens[row])
            assert row_len == self.lens[row] or row in self.errors
        assert result.step_seconds >= 0
        return tokens


def a_prompt_and_each_decode_step_give_one_token(worker: WorkerUnderTest) -> None:
    outputs = Stream(worker).generate(0, PROMPT, 4)
    assert len(outputs) == 4
    assert all(0 <= token_id < worker.vocab_size for token_id in outputs)


def a_middle_chunk_gives_no_token_and_the_last_one_the_same_as_a_whole_prompt(worker: WorkerUnderTest) -> None:
    stream = Stream(worker)
    expected = stream.generate(0, PROMPT, 2)
    stream.add(1, PROMPT)
    cut = 2 * worker.page_size
    assert cut < len(PROMPT)
    assert stream.run({1: range(cut)}) == {1: []}
    first = stream.run({1: range(cut, len(PROMPT))})[1]
    assert [*first, *stream.run(decodes=[1])[1]] == expected


def prompts_chunks_and_decodes_share_a_step(worker: WorkerUnderTest) -> None:
    stream = Stream(worker)
    expected = stream.generate(0, PROMPT, 3)
    stream.add(1, PROMPT)
    stream.run({1: range(len(PROMPT))})
    stream.add(2, PROMPT)
    stream.add(3, PROMPT[:7])
    cut = worker.page_size
    first = stream.run({3: range(7), 2: range(cut)}, decodes=[1])
    assert (len(first[3]), first[2], first[1]) == (1, [], [expected[1]])
    second = stream.run({2: range(cut, len(PROMPT))}, decodes=[1, 3])
    assert (second[2], second[1]) == ([expected[0]], [expected[2]])


def cached_pages_of_another_row_serve_a_prefix(worker: WorkerUnderTest) -> None:
    stream = Stream(worker)
    expected = stream.generate(0, PROMPT, 2)
    num_shared = (len(PROMPT) - 1) // worker.page_size
    shared = stream.tables[0][:num_shared]
    stream.add(1, PROMPT)
    start = num_shared * worker.page_size
    first = stream.run({1: range(start, len(PROMPT))}, shared={1: shared})[1]
    assert [*first, *stream.run(decodes=[1, 0])[1]] == expected


def a_request_resumes_with_its_outputs(worker: WorkerUnderTest) -> None:
    stream = Stream(worker)
    expected = stream.generate(0, PROMPT, 4)
    stream.freed_rows.append(0)
    known = [*PROMPT, *expected[:2]]
    stream.add(0, known, prompt_len=len(PROMPT))
    third = stream.run({0: range(len(known))})[0]
    assert [*third, *stream.run(decodes=[0])[0]] == expected[2:]


def a_freed_row_starts_anew_in_the_same_step(worker: WorkerUnderTest) -> None:
    stream = Stream(worker)
    expected = stream.generate(1, PROMPT[:7], 2)
    stream.generate(0, PROMPT, 3)
    stream.freed_rows += [0, 1]
    assert stream.generate(0, PROMPT[:7], 2) == expected
    assert stream.generations[0] == 2


def a_bad_row_fails_alone_with_a_message(worker: WorkerUnderTest) -> None:
    stream = Stream(worker)
    expected = stream.generate(0, PROMPT, 2)
    stream.add(1, [1, worker.vocab_size, 2])
    stream.add(2, PROMPT)
    tokens = stream.run({1: range(3), 2: range(len(PROMPT))}, decodes=[0])
    assert (tokens[1], tokens[2], len(tokens[0])) == ([], expected[:1], 1)
    assert set(stream.errors) == {1}
    assert stream.errors[1]
    stream.freed_rows.append(1)
    assert stream.run(decodes=[2])[2] == expected[1:]


def a_batch_without_rows_has_no_result(worker: WorkerUnderTest) -> None:
    stream = Stream(worker)
    expected = stream.generate(0, PROMPT, 2)
    stream.freed_rows.append(0)
    assert stream.run() == {}
    assert stream.generate(0, PROMPT, 2) == expected


def end_tokens_are_masked_until_min_new_tokens(worker: WorkerUnderTest) -> None:
    stream = Stream(worker)
    (first,) = stream.generate(0, PROMPT, 1)
    stream.add(1, PROMPT, ends=(first,), min_new_tokens=1)
    stream.add(2, PROMPT, ends=(first,))
    tokens = stream.run({1: range(len(PROMPT)), 2: range(len(PROMPT))})
    assert tokens[1] != [first]
    assert tokens[2] == [first]


CHECKS: tuple[Callable[[WorkerUnderTest], None], ...] = (
    a_prompt_and_each_decode_step_give_one_token,
    a_middle_chunk_gives_no_token_and_the_last_one_the_same_as_a_whole_prompt,
    prompts_chunks_and_decodes_share_a_step,
    cached_pages_of_another_row_serve_a_prefix,
    a_request_resumes_with_its_outputs,
    a_freed_row_starts_anew_in_the_same_step,
    a_bad_row_fails_alone_with_a_message,
    a_batch_without_rows_has_no_result,
    end_tokens_are_masked_until_min_new_tokens,
)


def check_worker_contract(make_worker: Callable[[], WorkerUnderTest]) -> None:
    """Run every check on a fresh worker; AssertionError from the first that fails."""
    for check in CHECKS:
        check(make_worker())
