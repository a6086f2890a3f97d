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
        if self._adder.num_steps(req, extend_len) <= self.start_step:
            return 0.0
        # a cached prefix that it keeps from eviction is taken too
        need = self._adder.num_total_tokens(req, extend_len) + req.num_tree_pages * self._adder.page_size
        return need if self._adder.num_chunks(extend_len) <= self.start_step and need <= self.extra_tokens else None

    def _find_start(self, head: Req) -> tuple[int, float]:
        """The first completion after which the head fits, and the memory left over then.

        A head whose lifetime is known may start between completions, as soon as those who hold memory now end early
        enough for what it will need (add_one_req_ignore_eos).
        """
        adder = self._adder
        extend_len = len(head.token_ids) - head.kv_allocated_len
        if head.ignore_eos:
            return adder.forecast().find_start(extend_len, adder.num_steps(head, extend_len))
        total_tokens = adder.num_total_tokens(head, extend_len)
        memory_left = adder.memory_left - adder.chunked_reserve
        steps = 0
        for holder, freed_tokens in adder.forecast().completions():
            steps = holder.steps_left
            memory_left += freed_tokens + holder.reserve
            if total_tokens < memory_left:
                return steps, memory_left - total_tokens
        return steps, 0.0
