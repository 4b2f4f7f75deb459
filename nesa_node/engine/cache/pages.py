"""Paged KV cache of a node: one pool of fixed-size pages, allocated once, shared by all sessions.

H key/value heads, D head size, S slots of the pool (one token each), L tokens.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from nesa_node.core.errors import CacheFullError
from nesa_node.core.ids import Span
from nesa_node.core.settings.choices import CacheDtype
from nesa_node.engine.cache.cache_side import CacheSide
from nesa_node.engine.cache.prefix_index import PrefixIndex, PrefixKey
from nesa_node.engine.weights.families import CacheHeads

MAX_STALE_HEAP_ENTRIES = 64
"""Outdated heap entries tolerated beyond one per run; at more the heap is rebuilt."""


class FreePageRuns:
    """Index of free runs. Every operation takes logarithmic time in the number of runs.

    Runs are maximal: if a page is not free, the next one is free only if a run begins there.
    """

    def __init__(self, pages: int) -> None:
        """Start with pages 0 to `pages` - 1 free."""
        self.pages = 0
        """Number of free pages."""
        self._end_by_start: dict[int, int] = {}
        """First page of each run -> page after its last."""
        self._start_by_end: dict[int, int] = {}
        """Page after the last of each run -> its first page."""
        self._heap: list[tuple[int, int]] = []
        """Heap of (-length, first page). Outdated entries are dropped when they reach the top."""
        self._add_run(0, pages)

    def is_run_start(self, page: int) -> bool:
        """Whether a run begins at `page`."""
        return page in self._end_by_start

    def longest_run(self) -> tuple[int, int]:
        """First page and length of the longest run, the lowest of several; (0, 0) if none."""
        while self._heap:
            length, start = -self._heap[0][0], self._heap[0][1]
            if self._end_by_start.get(start) == start + length:
                return start, length
            heapq.heappop(self._heap)
        return 0, 0

    def allocate(self, page: int, start: int) -> None:
        """Remove `page` from the run that begins at `start`."""
        end = self._remove_run(start)
        assert start <= page < end
        self._add_run(start, page)
        self._add_run(page + 1, end)

    def release(self, page: int) -> None:
        """Add `page`, which must not be free, and join it with adjacent runs."""
        start, end = self._start_by_end.get(page, page), page + 1
        if start < page:
            self._remove_run(start)
        if self.is_run_start(end):
            end = self._remove_run(end)
        self._add_run(start, end)

    def _add_run(self, start: int, end: int) -> None:
        if start == end:
            return
        self.pages += end - start
        self._end_by_start[start], self._start_by_end[end] = end, start
        heapq.heappush(self._heap, (start - end, start))
        if len(self._heap) > 2 * len(self._end_by_start) + MAX_STALE_HEAP_ENTRIES:
            self._heap = [(start - end, start) for start, end in self._end_by_start.items()]
            heapq.heapify(self._heap)

    def _remove_run(self, start: int) -> int:
        """Remove the run that begins at `start`; return the page after its last."""
        end = self._end_by_start.pop(start)
        del self._start_by_end[end]
        self.pages -= end - start
        return end


PAGE_TOKENS = 32
MAX_EVICTION_ROUNDS = 3


def pages_for(tokens: int) -> int:
    """Return how many pages hold `tokens` tokens of one row."""
    return -(-tokens // PAGE_TOKENS)


class PagePool:
    """Keys [S, H, D] and values [S, H, D] for each block of `span`, in one dtype on one device.

    Blocks may differ in H and D, and a block's values from its keys. With `cache_dtype` int8 they
    are held in 8 bits, and written and read in `dtype`.

    Page allocation is thread-safe, except for a row that is being run. The operating system commits
    memory when a page is first written. A row's pages are consecutive where possible, so that
    attention reads them as one view. Pages that only `prefixes` refers to count as free: they are
    evicted when a row needs them.
    """

    def __init__(
        self,
        span: Span,
        heads: CacheHeads | Sequence[CacheHeads],
        *,
        tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        cache_dtype: CacheDtype = "auto",
    ) -> None:
        self.span = span
        self.cache_dtype = cache_dtype
        each_heads = (heads,) * len(span) if isinstance(heads, CacheHeads) else tuple(heads)
        self.heads = each_heads
        """Of each block."""
        self.num_pages = max(pages_for(tokens), 1)
        slots = self.num_pages * PAGE_TOKENS
        self.keys, self.values = (
            [
                CacheSide.allocate(
                    (slots, *each.shapes[side]),
                    dtype=dtype,
                    cache_dtype=cache_dtype,
                    device=device,
                )
                for each in each_heads
            ]
            for side in (0, 1)
        )
        """Of each block."""
        self.device = device
        self.prefixes = PrefixIndex()
        self._lock = threading.RLock()
        self._free = FreePageRuns(self.num_pages)
        """Pages in no row and no prefix."""
        self._reference_counts = [0] * self.num_pages
        self.held_pages = 0
        """Pages that rows hold, each counted once even if shared."""
        self._reserved_pages = 0
        self._excess_pages = 0

    @property
    def tensors(self) -> list[Tensor]:
        """All of its memory, each with a slot's part at the slot's index."""
        return [tensor for side in (*self.keys, *self.values) for tensor in side.tensors]

    @property
    def cached_pages(self) -> int:
        """Pages that no row holds but that cache a prefix."""
        with self._lock:
            return self.num_pages - self.held_pages - self._free.pages

    @property
    def unreserved_pages(self) -> int:
        """Pages that can still be reserved."""
        return self.num_pages - self._reserved_pages - self._excess_pages

    def reserve(self, pages: int) -> CacheReservation:
        """Reserve `pages` for one session. Raises `CacheFullError` if fewer are free."""
        reservation = CacheReservation(self)
        reservation.grow(pages)
        return reservation

    def export_tokens(self, slots: slice | Tensor, span: Span) -> Tensor:
        """Copy `slots` of the blocks `span` to the CPU, in `export_shape`, all keys first.

        In the pool's dtype, also where they are held in 8 bits.
        """
        sides = [side.read(slots) for side in self._sides(span)]
        count = len(sides[0])
        if self._is_uneven(span):
            sides = [torch.cat([side_LHD.flatten(1) for side_LHD in sides], dim=1)[:, None]]
        return torch.stack(sides).view(self.export_shape(count, span)).cpu()

    def export_shape(self, count: int, span: Span) -> tuple[int, ...]:
        """Return [2 x blocks, L, H, D] for L = `count` tokens of the blocks `span`.

        If these cache different shapes, it is [1, L, 1, all of a token's elements].
        """
        sides = [side.stored_SHD for side in self._sides(span)]
        if self._is_uneven(span):
            return 1, count, 1, sum(side_SHD[0].numel() for side_SHD in sides)
        return len(sides), count, *sides[0].shape[1:]

    def import_tokens(self, slots: slice | Tensor, span: Span, tokens: Tensor) -> None:
        """Write the result of `export_tokens` to `slots` of the blocks `span`."""
        sides = self._sides(span)
        parts: Sequence[Tensor] = tokens.unbind()
        if self._is_uneven(span):
            sizes = [side.stored_SHD[0].numel() for side in sides]
            parts = torch.split(tokens[0, :, 0], sizes, dim=1)
        for side, tokens_LHD in zip(sides, parts, strict=True):
            shaped_LHD = tokens_LHD.reshape(-1, *side.stored_SHD.shape[1:])
            side.write(slots, shaped_LHD.to(self.device, side.dtype))

    def slot_bytes(self, span: Span) -> int:
        """Bytes of one token of the blocks `span`, as `export_bytes` has them."""
        return sum(side.slot_bytes for side in self._sides(span))

    def export_bytes(self, slots: slice | Tensor, span: Span) -> Tensor:
        """Copy what is stored in `slots` of the blocks `span` to the CPU: bytes [L, B].

        Of each token its keys of all blocks, then its values; codes before their scales.
        """
        return torch.cat([side.read_bytes(slots) for side in self._sides(span)], dim=1).cpu()

    def import_bytes(self, slots: slice | Tensor, span: Span, bytes_LB: Tensor) -> None:
        """Write the result of `export_bytes` of a pool of this kind to `slots`.

        Raises `ProtocolError` as `CacheSide.write_bytes` does. What was in `slots` is lost then.
        """
        sides = self._sides(span)
        parts = torch.split(bytes_LB, [side.slot_bytes for side in sides], dim=1)
        for side, part_LB in zip(sides, parts, strict=True):
            side.write_bytes(slots, part_LB)

    def _is_uneven(self, span: Span) -> bool:
        return len({side.stored_SHD.shape for side in self._sides(span)}) > 1

    def _sides(self, span: Span) -> list[CacheSide]:
        first, last = span.start - self.span.start, span.end - self.span.start
        return [*self.keys[first:last], *self.values[first:last]]

    def _allocate(self, count: int, after: int | None, expected: int) -> list[int]:
        """Allocate `count` pages, consecutive from `after` if those are free."""
        taken: list[int] = []
        while len(taken) < count:
            if after is not None and self._free.is_run_start(after + 1):
                start = page = after + 1
            else:
                start, page = self._choose_first_page(max(expected - len(taken), 1))
            self._free.allocate(page, start)
            self._acquire(page)
            taken.append(page)
            after = page
        return taken

    def _choose_first_page(self, expected: int) -> tuple[int, int]:
        """Choose the first page for a row of `expected` pages: it and the row before can then grow.

        Returns the first page of the free run, and the chosen page in it.
        """
        start, length = self._evict_until_contiguous(expected)
        assert length, "promises were kept, so a page must be free"
        if start == 0:
            return 0, 0
        return start, start + max(min(length // 2, length - expected), 0)

    def _evict_until_contiguous(self, expected: int) -> tuple[int, int]:
        """Evict old prefixes until `expected` consecutive pages are free; return the longest run.

        Without it rows would fragment once prefixes have filled the pool. `MAX_EVICTION_ROUNDS`
        rounds suffice mostly, since rows that started together, or one after another, lie together.
        """
        for _ in range(MAX_EVICTION_ROUNDS):
            start, length = self._free.longest_run()
            lacking = expected - length
            if lacking <= 0 or not self.cached_pages:
                return start, length
            self._free_unheld(self.prefixes.evict_oldest(lacking, self._is_unreferenced))
        return self._free.longest_run()

    def _free_unheld(self, pages: Iterable[int]) -> None:
        """Free those of these pages, which no prefix contains any more, that no row holds."""
        for page in filter(self._is_unreferenced, pages):
            self._free.release(page)

    def _is_unreferenced(self, page: int) -> bool:
        return not self._reference_counts[page]

    def _is_shared(self, page: int) -> bool:
        """Whether a row that holds this page must copy it before writing."""
        return self._reference_counts[page] > 1 or page in self.prefixes.key_by_page

    def _acquire(self, page: int) -> None:
        self.held_pages += not self._reference_counts[page]
        self._reference_counts[page] += 1

    def _release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._reference_counts[page] -= 1
            if self._is_unreferenced(page):
                self.held_pages -= 1
                if page not in self.prefixes.key_by_page:
                    self._free.release(page)


class CacheReservation:
    """Reservation of pages for one session. Rows beyond it hold unreserved pages on best effort.

    A shared page counts for every row that holds it, since each may have to copy it.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.pages = 0
        self.held_pages = 0
        """Pages that the session's rows hold, shared ones counted once per row."""
        self._tables: set[PageTable] = set()

    def grow(self, pages: int) -> None:
        """Reserve `pages` more. Raises `CacheFullError`; then the reservation is unchanged."""
        pool = self.pool
        with pool._lock:
            covered = self._excess_pages - max(self.held_pages - self.pages - pages, 0)
            if pages - covered > pool.unreserved_pages:
                raise CacheFullError(f"{pages} pages asked for, {pool.unreserved_pages} are free")
            self.pages += pages
            pool._reserved_pages += pages
            pool._excess_pages -= covered

    def new_table(self) -> PageTable:
        """Return the page table of an empty row."""
        table = PageTable(self)
        self._tables.add(table)
        return table

    def reorder(self, tables: Sequence[PageTable], sources: Sequence[int]) -> None:
        """Replace each row by a copy of row `sources[row]`; pages are shared until written.

        Raises `CacheFullError`; then nothing has changed.
        """
        pool = self.pool
        with pool._lock:
            rows = [(list(tables[source]._pages), tables[source].length) for source in sources]
            self._account(sum(len(pages) for pages, _ in rows) - sum(len(t._pages) for t in tables))
            for pages, _ in rows:
                for page in pages:
                    pool._acquire(page)
            for table, (pages, length) in zip(tables, rows, strict=True):
                pool._release(table._pages)
                table._pages, table.length = pages, length

    def close(self) -> None:
        """Release the reservation and all rows. May be called twice."""
        with self.pool._lock:
            for table in tuple(self._tables):
                table.close()
            self.pool._reserved_pages -= self.pages
            self.pages = 0

    @property
    def _excess_pages(self) -> int:
        return max(self.held_pages - self.pages, 0)

    def _account(self, pages: int) -> None:
        """Account for `pages` more (or fewer) held by rows. Raises `CacheFullError` for more."""
        pool = self.pool
        beyond = max(self.held_pages + pages - self.pages, 0) - self._excess_pages
        if beyond > 0 and beyond > pool.unreserved_pages:
            raise CacheFullError(
                f"the session holds {self.pages} pages reserved for it and needs {beyond} more, "
                f"but {pool.unreserved_pages} are free"
            )
        self.held_pages += pages
        pool._excess_pages += beyond


class PageTable:
    """Pages of one row, in order, of which the first `length` tokens are written."""

    def __init__(self, reservation: CacheReservation) -> None:
        self.reservation = reservation
        self.length = 0
        self._pages: list[int] = []

    @property
    def pool(self) -> PagePool:
        return self.reservation.pool

    @property
    def pages(self) -> tuple[int, ...]:
        return tuple(self._pages)

    @property
    def capacity(self) -> int:
        """Tokens that fit into the row's pages."""
        return len(self._pages) * PAGE_TOKENS

    def reserve(self, tokens: int) -> None:
        """Allocate pages for `tokens` in all, and make those to be written exclusive to this row.

        Raises `CacheFullError`; then nothing has changed.
        """
        pool, promise = self.pool, self.reservation
        with pool._lock:
            missing = max(pages_for(tokens) - len(self._pages), 0)
            written = self.length // PAGE_TOKENS
            # Only the partly written page can be shared: truncation releases those behind it. A
            # prefix has full pages only, but a row can be truncated into one.
            shared = (
                tokens > self.length
                and self.length % PAGE_TOKENS > 0
                and pool._is_shared(self._pages[written])
            )
            if not missing and not shared:
                return
            promise._account(missing)
            if shared:
                self._copy_on_write(written)
            after = self._pages[-1] if self._pages else None
            expected = promise.pages // max(len(promise._tables), 1) - len(self._pages)
            self._pages += pool._allocate(missing, after, expected)

    def truncate(self, length: int) -> None:
        """Drop all tokens from `length` on and free their pages.

        Raises `ValueError` beyond what is written.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot roll back to {length} of {self.length} cached tokens")
        with self.pool._lock:
            self.length = length
            self._release_from(pages_for(length))

    def adopt_pages(self, pages: Sequence[int], length: int) -> None:
        """Start this empty row with `length` tokens in pages of another row or a prefix.

        Raises `CacheFullError` like `reserve`.
        """
        assert not self._pages
        assert pages_for(length) == len(pages)
        with self.pool._lock:
            self.reservation._account(len(pages))
            for page in pages:
                self.pool._acquire(page)
            self._pages = list(pages)
            self.length = length

    def reuse_prefix(self, keys: Sequence[PrefixKey]) -> None:
        """Start this empty row with the cached pages of the longest known prefix of `keys`.

        Raises `CacheFullError` like `reserve`.
        """
        with self.pool._lock:
            pages = self.pool.prefixes.find(keys)
            self.adopt_pages(pages, len(pages) * PAGE_TOKENS)
            self.pool.prefixes.queried_tokens += len(keys) * PAGE_TOKENS
            self.pool.prefixes.reused_tokens += self.length

    def publish_prefix(self, keys: Sequence[PrefixKey]) -> None:
        """Register this row's full pages under `keys`, so that later rows can reuse them."""
        with self.pool._lock:
            full = min(len(keys), self.length // PAGE_TOKENS)
            self.pool.prefixes.add(keys[:full], self._pages[:full])

    def close(self) -> None:
        """Release all pages. May be called twice."""
        with self.pool._lock:
            self.length = 0
            self._release_from(0)
            self.reservation._tables.discard(self)

    def slots(self, start: int, end: int) -> slice | Tensor:
        """Pool slots of positions `start:end`: a slice if consecutive, else a tensor."""
        first, last = start // PAGE_TOKENS, pages_for(end)
        pages = self._pages[first:last]
        offset = start - first * PAGE_TOKENS
        if not pages:
            return slice(0, 0)
        if pages == list(range(pages[0], pages[0] + len(pages))):
            at = pages[0] * PAGE_TOKENS + offset
            return slice(at, at + end - start)
        starts = torch.tensor(pages).unsqueeze(1) * PAGE_TOKENS
        slots_S = (starts + torch.arange(PAGE_TOKENS)).flatten()[offset : offset + end - start]
        return slots_S.to(self.pool.device)

    def _copy_on_write(self, index: int) -> None:
        """Replace the shared page at `index` by a private copy (copy on write)."""
        before = self._pages[index - 1] if index else None
        shared = self._pages[index]
        if self.pool.held_pages == self.pool.num_pages:
            # With a full pool no row shares it, since each would have reserved a page for its copy:
            # drop the prefix.
            self.pool._free_unheld(self.pool.prefixes.remove(shared))
            return
        [own] = self.pool._allocate(1, before, 1)
        source, target = (slice(p * PAGE_TOKENS, (p + 1) * PAGE_TOKENS) for p in (shared, own))
        for tensor in self.pool.tensors:
            tensor[target] = tensor[source]
        self._pages[index] = own
        self.pool._release([shared])

    def _release_from(self, index: int) -> None:
        dropped = self._pages[index:]
        del self._pages[index:]
        self.pool._release(dropped)
        self.reservation._account(-len(dropped))
