"""SGLang's scheduler classes under the load of tests/bench/scheduler_load.py, in the environment of setup_sglang.sh.

    python -m tests.bench.peers.sglang_scheduler [--steps N] [--policies fcfs,lpm] [--waiting 100,10000]

From the repository's root; one JSON line a case, medians over the steps in microseconds. Each step takes the way of
SGLang's Scheduler through Req, SchedulePolicy, PrefillAdder, its tree and its allocator, on the CPU:

    order_us      SchedulePolicy.calc_priority on the waiting list
    add_us        PrefillAdder, init_next_round_input and add_one_req until a row is taken, and the queue without it
    pages_us      eviction as far as it is needed, the pages, the row, and the indices of the matched prefix
    admission_us  these three
    cache_us      checkpoint_kv_cache of the prompt that is computed, and release_kv_cache of the request that ended:
                  both put pages into the tree, the latter frees the rest and unlocks

The pages come by the cheapest call that its allocator has (`alloc`): `alloc_extend` and the write of the row are
kernels of a GPU there. What its scheduler does for a decode row (batch tensors, results, output) is in none of these
classes: it is done here untimed and as simply as it goes, so that requests grow, end and fill the cache as ours do.
"""

import argparse
import json
import random
import statistics
import time
from array import array
from collections import defaultdict

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import (
    WAITING_QUEUE_PREFIX_MATCH_MAX,
    AddReqResult,
    PrefillAdder,
    SchedulePolicy,
)
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, evict_from_tree_cache, release_kv_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams

from tests.bench.scheduler_load import (
    CHUNKED_PREFILL_SIZE,
    EOS_TOKEN_ID,
    MAX_PREFILL_TOKENS,
    NUM_PAGES,
    NUM_RUNNING,
    OUTPUT_LEN,
    PAGE_SIZE,
    PROMPT_LEN,
    VOCAB_SIZE,
    Load,
    Request,
    median_us,
    p99_us,
)

NEW_TOKEN_RATIO = 0.098  # where its tracker ends after 600 steps without retraction: 0.7 * 0.14
TreeClass = type[RadixCache] | type[UnifiedRadixCache]


class SGLangServer:
    """Its classes in the order in which its Scheduler calls them, and a worker that answers with random tokens."""

    def __init__(self, tree_class: TreeClass, policy: str) -> None:
        self.random = random.Random(1)
        self.rows = ReqToTokenPool(NUM_RUNNING, PROMPT_LEN + OUTPUT_LEN, "cpu", enable_memory_saver=False)
        self.allocator = PagedTokenToKVPoolAllocator(
            NUM_PAGES * PAGE_SIZE, PAGE_SIZE, torch.bfloat16, "cpu", kvcache=None, need_sort=False
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE_SIZE,
            tree_components=(ComponentType.FULL,),
        )
        self.tree = tree_class(params)
        self.policy = SchedulePolicy(
            policy,
            self.tree,
            enable_hierarchical_cache=False,
            enable_priority_scheduling=False,
            schedule_low_priority_values_first=False,
        )
        self.waiting_queue: list[Req] = []
        self.running_batch = ScheduleBatch(reqs=[])
        self.matched_lens: list[int] = []  # tokens, of each admitted request
        self.num_rows = 0  # of the last step
        self.times: dict[str, list[float]] = defaultdict(list)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting_queue)

    def ask(self, request: Request) -> None:
        sampling_params = SamplingParams(max_new_tokens=request.max_new_tokens, sampling_seed=request.seed)
        sampling_params.normalize(None)
        req = Req(
            request.rid,
            "",
            array("q", request.token_ids),
            sampling_params,
            stream=True,
            eos_token_ids={EOS_TOKEN_ID},
            vocab_size=VOCAB_SIZE,
        )
        self.waiting_queue.append(req)

    def step(self) -> None:
        """Admit, compute all rows, and release what ended."""
        admitted = self._admit()
        start = time.perf_counter()
        for req in admitted:
            checkpoint_kv_cache(req, self.tree)
        seconds = time.perf_counter() - start
        for req in admitted:
            req.output_ids.append(self._token_id())
        for req in self.running_batch.reqs:
            self._decode(req)
        self.running_batch.reqs += admitted
        self.num_rows = len(self.running_batch.reqs)
        for req in self.running_batch.reqs:
            if len(req.output_ids) == req.sampling_params.max_new_tokens:
                seconds += self._release(req)
        self.running_batch.reqs = [req for req in self.running_batch.reqs if not req.finished()]
        self.times["cache_us"].append(seconds)

    def _admit(self) -> list[Req]:
        start = time.perf_counter()
        self.policy.calc_priority(self.waiting_queue, self.running_batch)
        ordered = time.perf_counter()
        adder = self._add_waiting()
        added = time.perf_counter()
        slots = [self._take_pages(req) for req in adder.can_run_list]
        taken = time.perf_counter()
        for req, (prefix, new) in zip(adder.can_run_list, slots, strict=True):
            self._write_row(req, prefix, new)
        self.matched_lens += [req.prefix_len for req in adder.can_run_list]
        parts = {"order_us": ordered - start, "add_us": added - ordered, "pages_us": taken - added}
        for name, seconds in {"admission_us": taken - start, **parts}.items():
            self.times[name].append(seconds)
        return adder.can_run_list

    def _add_waiting(self) -> PrefillAdder:
        """Scheduler.get_new_batch_prefill as far as no option is on."""
        num_free_rows = NUM_RUNNING - len(self.running_batch.reqs)
        adder = PrefillAdder(
            PAGE_SIZE,
            self.tree,
            self.allocator,
            self.running_batch,
            NEW_TOKEN_RATIO,
            MAX_PREFILL_TOKENS,
            CHUNKED_PREFILL_SIZE,
            max_running_requests=NUM_RUNNING,
            waiting_queue_len=len(self.waiting_queue),
        )
        for req in self.waiting_queue:
            if adder.budget_state() == AddReqResult.OTHER or len(adder.can_run_list) >= num_free_rows:
                break
            req.init_next_round_input(self.tree)
            verdict = adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)
            if verdict != AddReqResult.CONTINUE:
                break
        admitted = set(adder.can_run_list)
        self.waiting_queue = [req for req in self.waiting_queue if req not in admitted]
        return adder

    def _take_pages(self, req: Req) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots of the matched prefix and those of the rest; prompts are whole pages."""
        prefix = self.tree.prefix_device_indices(req)
        self.rows.alloc([req])
        return prefix, self._alloc(req.extend_len)

    def _alloc(self, num_tokens: int) -> torch.Tensor:
        evict_from_tree_cache(self.tree, num_tokens)
        slots = self.allocator.alloc(num_tokens)
        assert slots is not None
        return slots

    def _write_row(self, req: Req, prefix: torch.Tensor, new: torch.Tensor) -> None:
        row, start, end = req.kv.req_pool_idx, req.prefix_len, req.extend_end
        self.rows.write((row, slice(0, start)), prefix)
        self.rows.write((row, slice(start, end)), new)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = end

    def _decode(self, req: Req) -> None:
        """The KV of its last token, and a new one."""
        kv_len = req.kv.kv_committed_len
        if kv_len % PAGE_SIZE == 0:
            self.rows.write((req.kv.req_pool_idx, slice(kv_len, kv_len + PAGE_SIZE)), self._alloc(PAGE_SIZE))
        req.kv.kv_allocated_len = req.kv.kv_committed_len = kv_len + 1
        req.output_ids.append(self._token_id())

    def _release(self, req: Req) -> float:
        """The seconds that it takes."""
        req.update_finish_state()
        assert req.finished()
        start = time.perf_counter()
        release_kv_cache(req, self.tree, checkpoint=True)
        return time.perf_counter() - start

    def _token_id(self) -> int:
        return self.random.randrange(VOCAB_SIZE - 1)


def measure(tree_class: TreeClass, policy: str, num_waiting: int, num_steps: int) -> dict[str, object]:
    """One case."""
    server = SGLangServer(tree_class, policy)
    load = Load(server, num_waiting)
    server.times.clear()
    server.matched_lens.clear()
    load.run(num_steps)
    core = type(getattr(server.tree, "tree_core", None)).__name__
    tree = "RadixCache (Python)" if tree_class is RadixCache else f"UnifiedRadixCache ({core})"
    return {
        "server": "sglang",
        "tree": tree,
        "policy": policy,
        "waiting": num_waiting,
        "lpm_fell_back_to_fcfs": policy == "lpm" and num_waiting > WAITING_QUEUE_PREFIX_MATCH_MAX,
        "matched_all_waiting": server.policy.waiting_queue_prefix_matched(server.waiting_queue),
        "rows": server.num_rows,
        "admitted_per_step": round(len(server.matched_lens) / num_steps, 2),
        "matched_tokens": statistics.median(server.matched_lens),
        "admission_p99_us": p99_us(server.times["admission_us"]),
    } | {name: median_us(seconds) for name, seconds in server.times.items()}


def main() -> None:
    """Measure with the tree in Python, then with the default one, whose core is the wheel's Rust extension."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--policies", default="fcfs,lpm")
    parser.add_argument("--waiting", default="100,10000")
    options = parser.parse_args()
    for tree_class in (RadixCache, UnifiedRadixCache):
        for policy in options.policies.split(","):
            with get_context().override_server_args(
                page_size=PAGE_SIZE, schedule_policy=policy, attention_backend="torch_native"
            ):
                for num_waiting in map(int, options.waiting.split(",")):
                    print(json.dumps(measure(tree_class, policy, num_waiting, options.steps)), flush=True)


if __name__ == "__main__":
    main()
