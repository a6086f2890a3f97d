"""Waiting for a prefix that another request is computing right now, instead of computing it a second time.

SGLang's in-batch prefix caching: of several waiters that share a new prefix one goes first, and the others wait for its
pages. A waiter remembers whom it waits for, so a step costs it a look at that one's status.
"""

from collections.abc import Iterable

from .page_pool import PagePool
from .req import Req, ReqStatus

MIN_SHARED_TOKENS = 32  # SGLang's IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD
COMPUTING = (ReqStatus.PREFILLING, ReqStatus.RUNNING)

Beginning = tuple[object, bytes]  # namespace, first tokens


class PrefixesOnTheWay:
    """The requests whose prefill is not back yet, by how they begin. Made for one step, when somebody asks."""

    def __init__(self, page_size: int, prefilling: Iterable[Req]) -> None:
        self._page_size = page_size
        self._min_len = -(-MIN_SHARED_TOKENS // page_size) * page_size
        self._reqs: dict[Beginning, list[Req]] = {}
        self._families: dict[str, Req] = {}
        for req in prefilling:
            self.add(req)

    def add(self, req: Req) -> None:
        """One more computes its prompt."""
        if req.family is not None and not req.is_private:
            self._families.setdefault(req.family, req)
        if len(req.token_ids) >= self._min_len and not req.is_private:
            self._reqs.setdefault(self._beginning(req), []).append(req)

    def find(self, req: Req) -> tuple[Req, int] | None:
        """The request that computes most of what `req` lacks, and the length (in whole pages) that they share.

        None where nobody computes at least MIN_SHARED_TOKENS more than the tree holds: one page is enough among answers
        to one prompt. `req` is looked up already.
        """
        sibling = self._find_sibling(req)
        if sibling is not None:
            return sibling
        page_size = self._page_size
        cached_len = req.num_tree_pages * page_size
        min_len = cached_len + self._min_len
        if req.max_cached_len < min_len:
            return None
        best: tuple[Req, int] | None = None
        for other in self._reqs.get(self._beginning(req), ()):
            limit = min(req.max_cached_len, len(other.token_ids)) // page_size * page_size
            if limit < min_len or other is req or not _will_cache(other, min_len, page_size):
                continue
            if not _is_equal(req, other, cached_len, min_len) or not _is_equal(req, other, 0, cached_len):
                continue
            shared_len = _shared_len(req, other, min_len, limit, page_size)
            if best is None or shared_len > best[1]:
                best = (other, shared_len)
        return best

    def _find_sibling(self, req: Req) -> tuple[Req, int] | None:
        """Another answer to the same prompt that computes it, and the prompt's whole pages."""
        other = self._families.get(req.family) if req.family is not None else None
        if other is None or other is req:
            return None
        shared_len = min(req.max_cached_len, req.prompt_len) // self._page_size * self._page_size
        if shared_len <= req.num_tree_pages * self._page_size or not _will_cache(other, shared_len, self._page_size):
            return None
        return other, shared_len

    def _beginning(self, req: Req) -> Beginning:
        return req.namespace, req.key(0, self._min_len)


def waits_for_prefix(req: Req, pool: PagePool, on_the_way: PrefixesOnTheWay) -> bool:
    """Whether another request is computing a prefix of this one; looks this one up in the tree if not."""
    if still_waits(req, pool.page_size):
        return True
    pool.init_next_round_input(req)
    req.waits_for = None if pool.tree_cache.disabled else on_the_way.find(req)
    return req.waits_for is not None


def still_waits(req: Req, page_size: int) -> bool:
    """Whether the prefix that `req` waits for is still on its way into the tree."""
    if req.waits_for is None:
        return False
    other, shared_len = req.waits_for
    if other.status not in COMPUTING or not _will_cache(other, shared_len, page_size):
        req.waits_for = None
    return req.waits_for is not None


def _will_cache(other: Req, length: int, page_size: int) -> bool:
    """Whether `other`, if it goes on, has yet to put the first `length` tokens into the tree."""
    return not other.is_private and other.num_tree_pages * page_size < length


def _is_equal(req: Req, other: Req, start: int, end: int) -> bool:
    return req.key(start, end) == other.key(start, end)


def _shared_len(req: Req, other: Req, low: int, limit: int, page_size: int) -> int:
    """Tokens (whole pages) that both begin with; the first `low` are known to be equal, `limit` bounds the answer."""
    if _is_equal(req, other, low, limit):
        return limit
    equal, differs = low // page_size, limit // page_size
    while differs - equal > 1:
        middle = (equal + differs) // 2
        if _is_equal(req, other, equal * page_size, middle * page_size):
            equal = middle
        else:
            differs = middle
    return equal * page_size
