"""Backfilling: small requests go ahead of one that lacks memory, where that does not make it wait longer.

EASY backfilling (Lifka 1995) with KV slots for processors. By the estimates (max_new_tokens) the blocked head starts when
the first running requests have ended whose memory it needs: its reservation. Another one may pass if it fits now and

    either ends, its chunks and outputs counted in steps, before the reservation begins,
    or fits into what is left over then besides the head, and is computed by then.

With exact lifetimes (ignore_eos) the head starts no later than without. As estimates err, at most MAX_BACKFILLS requests
pass one head. Rows need no reservation: whoever ends when the head starts leaves it a row.
"""

from .prefill_adder import PrefillAdder
from .req import Req

MAX_BACKFILLS = 16


class Reservation:
    """When the head starts, in steps from now, and what is left over then."""

    def __init__(self, adder: PrefillAdder, head: Req) -> None:
        """`head` is looked up in the tree, and was refused for memory."""
        assert head.last_node is not None
        self._adder = adder
        tree_cache = adder.pool.tree_cache
        tree_cache.inc_lock_ref(head.last_node)
        self.start_step, self.extra_tokens = self._find_start(head)
        tree_cache.dec_lock_ref(head.last_node)

    def share_of(self, req: Req) -> float | None:
        """What a candidate, looked up in the tree, takes of `extra_tokens` if it passes; None: the head would wait."""
        extend_len = len(req.token_ids) - req.kv_allocated_len
        num_chunks = self._adder.num_chunks(extend_len)
        if num_chunks + req.num_left_to_plan <= self.start_step:
            return 0.0
        # a cached prefix that it keeps from eviction is taken too
        need = self._adder.num_total_tokens(req, extend_len) + req.num_tree_pages * self._adder.page_size
        return need if num_chunks <= self.start_step and need <= self.extra_tokens else None

    def _find_start(self, head: Req) -> tuple[int, float]:
        """The first completion after which the head fits, and the memory left over then.

        A head with a known lifetime may fit earlier than the sum of all estimates says (add_one_req_ignore_eos). Then
        its start is taken to be as early as its prompt fits, and nothing counts as left over.
        """
        adder = self._adder
        extend_len = len(head.token_ids) - head.kv_allocated_len
        total_tokens = adder.num_total_tokens(head, extend_len)
        memory_left = adder.memory_left - adder.chunked_reserve
        available = float(adder.pool.num_available_pages * adder.page_size)
        steps = 0
        for holder, freed_tokens in adder.forecast().completions():
            steps = holder.steps_left
            memory_left += freed_tokens + holder.reserve
            available += freed_tokens
            if total_tokens < memory_left:
                return steps, memory_left - total_tokens
            if head.ignore_eos and extend_len < available:
                return steps, 0.0
        return steps, 0.0
