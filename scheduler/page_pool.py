"""KV pages as the scheduler uses them: the free list and the radix tree behind one count of what can be had."""

from .page_allocator import PageAllocator
from .radix_tree import RadixCache
from .req import Req


class PagePool:
    """Gives pages to requests and takes them back. Every page is in the free list, in the tree, or one request's own."""

    def __init__(
        self, num_pages: int, page_size: int, *, disable_radix_cache: bool = False, eviction_policy: str = "lru"
    ) -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        self.tree_cache = RadixCache(page_size, disabled=disable_radix_cache, eviction_policy=eviction_policy)

    @property
    def num_available_pages(self) -> int:
        """Free pages and pages that eviction can free."""
        return self.allocator.num_free_pages + self.tree_cache.evictable_pages

    @property
    def max_total_num_tokens(self) -> int:
        """Tokens that all pages hold together."""
        return self.allocator.num_pages * self.page_size

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def alloc(self, num_pages: int) -> list[int] | None:
        """Take pages, evicting cached ones where the free list is short; None (nothing taken) when there are not enough."""
        if num_pages > self.num_available_pages:
            return None
        short = num_pages - self.allocator.num_free_pages
        if short > 0:
            self.allocator.free(self.tree_cache.evict(short))
        return self.allocator.alloc(num_pages)

    def init_next_round_input(self, req: Req) -> None:
        """Look the request's tokens up in the tree, as far as they need not be computed. Nothing is locked yet."""
        match = self.tree_cache.match_prefix(req.namespace, req.key(0, req.max_cached_len))
        req.last_node = match.last_node
        req.page_ids = match.page_ids
        req.num_tree_pages = len(match.page_ids)
        req.kv_committed_len = req.kv_allocated_len = req.num_slots = len(match.page_ids) * self.page_size

    def grow(self, req: Req, kv_len: int) -> bool:
        """Append pages to the request's table until it holds `kv_len` tokens; False (nothing done) when pages are short."""
        page_ids = self.alloc(max(0, self.num_pages_for(kv_len) - len(req.page_ids)))
        if page_ids is None:
            return False
        req.page_ids += page_ids
        req.num_slots = len(req.page_ids) * self.page_size
        req.kv_allocated_len = kv_len
        return True

    def grow_each(self, reqs: list[Req], num_tokens: int) -> list[Req]:
        """Give each of `reqs` room for `num_tokens` more; returns those that got it: the first ones when pages are short."""
        num_pages = sum(self.num_pages_for(req.kv_allocated_len + num_tokens) - len(req.page_ids) for req in reqs)
        short = num_pages - self.allocator.num_free_pages
        if short > 0:
            self.allocator.free(self.tree_cache.evict(short))  # at once: cheaper than page by page
        return [req for req in reqs if self.grow(req, req.kv_allocated_len + num_tokens)]

    def cache_unfinished_req(self, req: Req) -> None:
        """Let the tree have the whole pages that are committed since the last call; the request goes on using them.

        Where another request was first with the same tokens, ours stay private until the end: a running request's page
        table never changes, and a lock on the other's pages would hold twice the memory.
        """
        num_pages = req.kv_committed_len // self.page_size
        if num_pages == req.num_tree_pages or req.is_private or self.tree_cache.disabled:
            return
        assert req.last_node is not None
        key = req.key(req.num_tree_pages * self.page_size, num_pages * self.page_size)
        if self.tree_cache.has_next_page(req.last_node, req.namespace, key):
            req.is_private = True
            return
        new_page_ids = req.page_ids[req.num_tree_pages : num_pages]
        req.last_node = self.tree_cache.append(req.last_node, req.namespace, key, new_page_ids)
        req.num_tree_pages = num_pages

    def cache_finished_req(self, req: Req) -> None:
        """Let the tree have the whole committed pages that it lacks; free the others, and unlock."""
        assert req.last_node is not None
        start = req.num_tree_pages
        end = max(start, 0 if self.tree_cache.disabled else req.kv_committed_len // self.page_size)
        key = req.key(start * self.page_size, end * self.page_size)
        result = self.tree_cache.insert(req.last_node, req.namespace, key, req.page_ids[start:end])
        self.allocator.free(req.page_ids[start : start + result.num_present_pages])
        self.allocator.free(req.page_ids[end:])
        self.tree_cache.inc_hit_count(result.last_node, req.priority)
        self.tree_cache.dec_lock_ref(req.last_node)

    def reset(self) -> None:
        """Empty the tree; no request may hold pages."""
        self.allocator.free(self.tree_cache.reset())
