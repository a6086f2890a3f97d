"""The prefix-cache hit rate of every scheduling policy, on loads that share prefixes: one JSON line a case.

Three loads, each with more prefixes than the cache holds: documents with questions (rag), conversations (multi-turn) and
paths through a tree of texts (tree). The real scheduler runs in virtual steps with a worker that answers at once; a step
is a unit of time. Beside the policies:

    best order       all requests known beforehand and served in the order of their tokens (depth first, for which the
                     cache is always large enough: Zheng et al. 2024, arXiv 2312.07104, theorem 3.1)
    unbounded cache  every page computed once: no order and no cache does better

`hit_rate` is the share of prompt tokens found in the cache at a request's first step; `of_best` is relative to the best
order. Waits are in steps.

    python -m tests.bench.policies [--seed N]
"""

import argparse
import itertools
import json
import random
import statistics
import zlib
from array import array
from dataclasses import dataclass, field

from millstream.common.batch_messages import BatchResult
from millstream.common.config import SCHEDULE_POLICIES
from millstream.common.messages import TokenizedGenerateReqInput, pack_int32
from millstream.common.sampling_params import SamplingParams
from millstream.scheduler.scheduler import Scheduler
from millstream.scheduler.scheduler_config import SchedulerConfig

VOCAB_SIZE = 30_000
PAGE_SIZE = 16
OUTPUT_LEN = 16
NUM_KV_TOKENS = 16_384
MAX_RUNNING = 8
AGEING_STEPS = 1000


@dataclass
class Turn:
    """One request; the next turn of its conversation begins with its prompt and output."""

    arrival: int  # a step; of a later turn: steps after the turn before has ended
    prompt: list[int]
    routing_key: str
    next_turn: "Turn | None" = None
    rank: float | None = None  # stands for its time of arrival, where the order is given
    outputs: list[int] = field(default_factory=list)


def text(rng: random.Random, length: int) -> list[int]:
    """A text that nothing else shares."""
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


def rag(rng: random.Random) -> list[Turn]:
    """Questions about 60 documents, some of them popular: twice the cache."""
    documents = [text(rng, 512) for _ in range(60)]
    weights = [1 / (rank + 1) ** 0.8 for rank in range(60)]
    turns = []
    for i in range(600):
        document = rng.choices(range(60), weights)[0]
        turns.append(Turn(i // 2, documents[document] + text(rng, rng.randint(20, 60)), f"document {document}"))
    return turns


def multi_turn(rng: random.Random) -> list[Turn]:
    """Conversations of five turns, many more at a time than the cache holds."""
    system = text(rng, 128)
    firsts = []
    for i in range(100):
        turns = [Turn(rng.randrange(200), system + text(rng, rng.randint(100, 200)), f"user {i}")]
        for _ in range(4):
            turns.append(Turn(rng.randint(5, 60), text(rng, rng.randint(60, 120)), f"user {i}"))
            turns[-2].next_turn = turns[-1]
        firsts.append(turns[0])
    return firsts


def tree(rng: random.Random) -> list[Turn]:
    """Agents that explore a tree: four levels of five branches, 128 tokens a node."""
    nodes: dict[tuple[int, ...], list[int]] = {}
    turns = []
    for i in range(800):
        path = tuple(rng.randrange(5) for _ in range(4))
        prompt = []
        for depth in range(1, 5):
            prompt += nodes.setdefault(path[:depth], text(rng, 128))
        turns.append(Turn(i // 3, prompt + text(rng, 8), f"branch {path[0]}"))
    return turns


LOADS = {"rag": rag, "multi-turn": multi_turn, "tree": tree}


class Run:
    """A scheduler under one policy, its worker and its clients."""

    def __init__(self, policy: str) -> None:
        config = SchedulerConfig(
            num_pages=NUM_KV_TOKENS // PAGE_SIZE,
            page_size=PAGE_SIZE,
            vocab_size=VOCAB_SIZE,
            context_len=4096,
            max_running_requests=MAX_RUNNING,
            schedule_policy=policy,
            schedule_ageing_steps=AGEING_STEPS,
            max_queued_requests=100_000,
            max_queued_tokens=10**9,
        )
        self.scheduler = Scheduler(config)
        self.turns: dict[str, Turn] = {}
        self.asked: dict[str, int] = {}
        self.waits: list[int] = []
        self.step = 0

    def serve(self, turns: list[Turn]) -> "Run":
        """Until all have ended, later turns included."""
        numbers = itertools.count()
        due = sorted(((turn.arrival, next(numbers), turn) for turn in turns), reverse=True)
        while due or self.scheduler.state.requests:
            while due and due[-1][0] <= self.step:
                self._ask(due.pop()[2])
            for turn in self._run_step():
                if turn.next_turn is not None:
                    turn.next_turn.prompt = turn.prompt + turn.outputs + turn.next_turn.prompt
                    due.append((self.step + turn.next_turn.arrival, next(numbers), turn.next_turn))
                    due.sort(reverse=True)
            self.step += 1
        return self

    def _ask(self, turn: Turn) -> None:
        rid = f"r{len(self.turns)}"
        self.turns[rid], self.asked[rid] = turn, self.step
        message = TokenizedGenerateReqInput(
            rid,
            "http",
            self.step + len(self.turns) / 1e6 if turn.rank is None else turn.rank,
            pack_int32(turn.prompt),
            SamplingParams(max_new_tokens=OUTPUT_LEN, ignore_eos=True, seed=0),
            routing_key=turn.routing_key,
        )
        self.scheduler.handle(message, float(self.step))

    def _run_step(self) -> list[Turn]:
        """Plan a step and answer it at once; returns the turns that ended."""
        scheduler, now = self.scheduler, float(self.step)
        if scheduler.get_next_batch_to_run(now) is None:
            return []
        step = scheduler.state.in_flight[-1]
        rows = [*step.extends, *step.decodes]
        counts = [int(samples) for samples in step.extend_samples] + [1] * len(step.decodes)
        token_ids = [next_token(req.token_ids) for req, count in zip(rows, counts, strict=True) if count]
        self.waits += [self.step - self.asked.pop(req.rid) for req in step.extends if req.rid in self.asked]
        result = BatchResult(
            step=step.step,
            rows=step.packed_rows,
            generations=step.packed_generations,
            num_tokens=pack_int32(counts),
            token_ids=pack_int32(token_ids),
            row_lens=pack_int32([0] * len(rows)),
            flags=pack_int32([0] * len(rows)),
            errors={},
            step_seconds=0.01,
        )
        scheduler.process_batch_result(result, now)
        scheduler.take_output()
        ended = [req for req in rows if req.rid not in scheduler.state.requests]
        for req in ended:
            self.turns[req.rid].outputs = req.token_ids[req.prompt_len :].tolist()
        return [self.turns[req.rid] for req in ended]

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were cached."""
        stats = self.scheduler.state.stats
        return stats.num_hit_tokens / stats.num_query_tokens


def next_token(token_ids: "array[int]") -> int:
    """A pure function of the last tokens, so that every policy gives every request the same output."""
    return zlib.crc32(token_ids[-64:].tobytes()) % VOCAB_SIZE


def best_order(turns: list[Turn]) -> Run:
    """All there from the start, in the order of their tokens; a conversation goes on as soon as it can."""
    for rank, first in enumerate(sorted(turns, key=lambda turn: turn.prompt)):
        turn: Turn | None = first
        while turn is not None:
            turn.arrival, turn.rank = 0, float(rank)
            turn = turn.next_turn
    return Run("fcfs").serve(turns)


def unbounded_hit_rate(run: Run) -> float:
    """Hits if no page were ever evicted, and none computed twice: each request after the ones whose pages it needs."""
    cached: set[bytes] = set()
    num_hits = num_tokens = 0
    for turn in run.turns.values():
        num_tokens += len(turn.prompt)
        known = array("i", turn.prompt + turn.outputs[:-1])  # the last token has no KV
        ends = range(PAGE_SIZE, len(known) + 1, PAGE_SIZE)
        keys = [zlib.crc32(known[:end].tobytes()).to_bytes(4) + end.to_bytes(4) for end in ends]
        num_hits += PAGE_SIZE * sum(
            key in cached for key, end in zip(keys, ends, strict=True) if end < len(turn.prompt)
        )
        cached.update(keys)
    return num_hits / num_tokens


def main() -> None:
    """All policies on all loads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    for name, make_load in LOADS.items():
        runs = {policy: Run(policy).serve(make_load(random.Random(seed))) for policy in SCHEDULE_POLICIES}
        best = best_order(make_load(random.Random(seed)))
        for policy, run in [*runs.items(), ("best order", best)]:
            figures = {
                "load": name,
                "policy": policy,
                "hit_rate": round(run.hit_rate, 3),
                "of_best": round(run.hit_rate / best.hit_rate, 3),
                "steps": run.step,
                "mean_wait": round(statistics.mean(run.waits), 1),
                "max_wait": max(run.waits),
            }
            print(json.dumps(figures), flush=True)
        bound = unbounded_hit_rate(runs["fcfs"])
        of_best = round(bound / best.hit_rate, 3)
        print(json.dumps({"load": name, "policy": "unbounded cache", "hit_rate": round(bound, 3), "of_best": of_best}))


if __name__ == "__main__":
    main()
