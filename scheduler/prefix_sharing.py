"""Waiting for a prefix that another request is computing right now, instead of computing it a second time."""

from collections.abc import Iterable

from .req import Req, ReqStatus

MIN_SHARED_TOKENS = 32  # SGLang's IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD
COMPUTING = (ReqStatus.PREFILLING, ReqStatus.RUNNING)


def find_prefix_to_wait_for(req: Req, prefilling: Iterable[Req], page_size: int) -> tuple[Req, int] | None:
    """The request whose prefill computes most of what `req` lacks, and the length (in whole pages) that they share.

    None where nobody computes at least MIN_SHARED_TOKENS more than the tree holds. `req` is looked up already.
    """
    cached_len = req.num_tree_pages * page_size
    min_len = cached_len + -(-MIN_SHARED_TOKENS // page_size) * page_size
    if len(req.token_ids) <= min_len:
        return None
    best: tuple[Req, int] | None = None
    for other in prefilling:
        limit = min(len(req.token_ids) - 1, len(other.token_ids)) // page_size * page_size
        if limit < min_len or other.namespace != req.namespace or not _will_cache(other, min_len, page_size):
            continue
        if other.key(cached_len, min_len) != req.key(cached_len, min_len):
            continue
        shared_len = _shared_len(req, other, min_len, limit, page_size)
        if best is None or shared_len > best[1]:
            best = (other, shared_len)
    return best


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


def _shared_len(req: Req, other: Req, low: int, limit: int, page_size: int) -> int:
    """Tokens (whole pages) that both begin with; the first `low` are known to be equal, `limit` bounds the answer."""
    if other.key(low, limit) == req.key(low, limit):
        return limit
    equal, differs = low // page_size, limit // page_size
    while differs - equal > 1:
        middle = (equal + differs) // 2
        start, end = equal * page_size, middle * page_size
        if other.key(start, end) == req.key(start, end):
            equal = middle
        else:
            differs = middle
    return equal * page_size
