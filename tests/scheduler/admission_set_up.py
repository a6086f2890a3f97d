"""What the tests of admission share: requests, budgets and pools made by hand."""

import math
from array import array
from random import Random

from millstream.common.messages import TokenizedGenerateReqInput, pack_int32
from millstream.common.sampling_params import SamplingParams
from millstream.scheduler.page_pool import PagePool
from millstream.scheduler.prefill_adder import AddReqResult, PrefillAdder
from millstream.scheduler.req import Req
from millstream.scheduler.scheduler_config import SchedulerConfig
from millstream.scheduler.waiting_queue import WaitingQueue


def make_req(
    num_tokens: int,
    max_new_tokens: int = 10,
    *,
    first: int = 0,
    ignore_eos: bool = False,
    token_ids: list[int] | None = None,
    rid: str | None = None,
    arrival: float = 0.0,
    priority: int = 0,
    routing_key: str | None = None,
) -> Req:
    tokens = array("i", range(first, first + num_tokens) if token_ids is None else token_ids)
    params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=ignore_eos)
    message = TokenizedGenerateReqInput(
        rid or f"r{first}", "http", arrival, pack_int32(tokens), params, routing_key=routing_key
    )
    return Req(message, tokens, max_new_tokens, priority)


def make_adder(
    pool: PagePool,
    running: list[Req] | None = None,
    *,
    ratio: float = 0.5,
    chunk: float | None = 64,
    attention_len: float = math.inf,
    max_input: int = 1000,
    num_decodes: int = 0,
    max_requests: int = 100,
    ending: list[Req] | None = None,
) -> PrefillAdder:
    return PrefillAdder(
        pool,
        running or [],
        ratio,
        rem_input_tokens=max_input,
        rem_chunk_tokens=chunk,
        attention_len=attention_len,
        num_mixed_decode_tokens=num_decodes,
        prefill_max_requests=max_requests,
        ending=ending or [],
    )


def add(adder: PrefillAdder, req: Req) -> AddReqResult:
    adder.pool.init_next_round_input(req)
    return adder.add_one_req(req)


def run(pool: PagePool, req: Req) -> Req:
    """Let a request hold its prompt's pages, as a running one does."""
    pool.init_next_round_input(req)
    assert req.last_node is not None
    pool.tree_cache.inc_lock_ref(req.last_node)
    assert pool.grow(req, len(req.token_ids))
    return req


def cache(pool: PagePool, token_ids: list[int]) -> None:
    """Put a prompt into the tree (whole pages)."""
    num_pages = len(token_ids) // pool.page_size
    page_ids = pool.alloc(num_pages)
    assert page_ids is not None
    key = array("i", token_ids[: num_pages * pool.page_size]).tobytes()
    result = pool.tree_cache.insert(pool.tree_cache.root, (None, None), key, page_ids)
    pool.allocator.free(page_ids[: result.num_present_pages])


def random_prompt(rng: Random, length: int) -> list[int]:
    return [rng.randrange(50) for _ in range(length)]


def make_queue(
    policy: str = "fcfs",
    pool: PagePool | None = None,
    *,
    ageing: int = 1000,
    priorities: bool = False,
    seed: int = 0,
) -> WaitingQueue:
    """An empty queue, over a tree of its own unless a pool is given."""
    config = SchedulerConfig(
        num_pages=100,
        page_size=4,
        vocab_size=50,
        context_len=100,
        max_running_requests=8,
        schedule_policy=policy,
        schedule_ageing_steps=ageing,
        enable_priority_scheduling=priorities,
        random_seed=seed,
    )
    return WaitingQueue(config, (pool or PagePool(100, 4)).tree_cache)
