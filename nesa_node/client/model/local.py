"""Sessions over blocks in the client's own process.

They run the blocks that a client keeps (`client_blocks`), and whole models in tests and in
`evaluation`, which emulates a swarm's codecs.

T packed tokens, D hidden.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import torch

from nesa_node.client.session.base import (
    BlockSession,
    RowSlice,
    SessionPrefix,
    SwarmConnection,
    Want,
)
from nesa_node.compression.tensors import decode, encode
from nesa_node.core.errors import CacheFullError, MissingBlocksError
from nesa_node.core.ids import PeerId
from nesa_node.core.span import Span
from nesa_node.engine.cache.pages import PAGE_TOKENS, pages_for
from nesa_node.engine.model.blocks import ModelBlocks, RowChunk
from nesa_node.routing.chains import Hop

CLIENT_PEER = PeerId("client")
"""Peer id of this process in `hops`."""


class LocalSession:
    """`BlockSession` of `rows` sequences in consecutive spans of blocks of this process."""

    codecs = ()
    failovers = ()

    def __init__(
        self,
        parts: Sequence[ModelBlocks],
        worker: ThreadPoolExecutor,
        *,
        rows: int,
        max_tokens: int,
        codec: str = "none",
    ) -> None:
        self._parts = tuple(parts)
        self._worker = worker
        self._codec = codec
        pages = rows * pages_for(max_tokens)
        promises = [part.new_pool(pages * PAGE_TOKENS).reserve(pages) for part in parts]
        self._tables = [[promise.new_table() for _ in range(rows)] for promise in promises]
        self._lengths = [0] * rows
        self.rows = rows
        self.max_tokens = max_tokens
        self.hops = tuple(Hop(CLIENT_PEER, part.span) for part in parts)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self._lengths)

    async def step(
        self, hidden_TD: torch.Tensor, rows: Sequence[RowSlice], *, want: Want = "all"
    ) -> torch.Tensor:
        check_slices(rows, self._lengths, self.max_tokens, hidden_TD.shape[0])
        result = await asyncio.get_running_loop().run_in_executor(
            self._worker, self._run, hidden_TD, rows, want
        )
        for part in rows:
            self._lengths[part.row] += part.count
        return result

    async def rollback(self, lengths: Sequence[int]) -> None:
        for row, length in enumerate(lengths):
            if not 0 <= length <= self._lengths[row]:
                raise ValueError(f"row {row} holds {self._lengths[row]} tokens, not {length}")
            self._lengths[row] = length
        self._truncate_tables()

    async def reorder(self, sources: Sequence[int]) -> None:
        for tables in self._tables:
            tables[0].reservation.reorder(tables, sources)
        self._lengths = [self._lengths[source] for source in sources]

    async def close(self) -> None:
        self._tables = []

    def _run(self, hidden_TD: torch.Tensor, rows: Sequence[RowSlice], want: Want) -> torch.Tensor:
        output_TD = hidden_TD
        try:
            for blocks, tables in zip(self._parts, self._tables, strict=True):
                runs = [RowChunk(tables[part.row], part.count) for part in rows]
                for run in runs:
                    run.table.reserve(run.table.length + run.count)
                output_TD = blocks.forward(self._round_by_codec(output_TD), runs)
        except BaseException:
            self._truncate_tables()
            raise
        if want != "all":
            ends = torch.tensor([part.count for part in rows]).cumsum(0) - 1
            output_TD = output_TD[ends if want == "last" else ends[:0]]
        return self._round_by_codec(output_TD).to(hidden_TD.device, hidden_TD.dtype)

    def _round_by_codec(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        if self._codec == "none":
            return hidden_TD
        meta, data = encode(hidden_TD, codec=self._codec)
        return decode(meta, data, max_bytes=max(data.nbytes, hidden_TD.nbytes))

    def _truncate_tables(self) -> None:
        for tables in self._tables:
            for table, length in zip(tables, self._lengths, strict=True):
                table.truncate(min(length, table.length))


class LocalConnection(SwarmConnection):
    """Opens sessions over `parts`, in the order of their blocks. Close it after its sessions.

    Hidden states are rounded by `codec` wherever nodes would send them: into the first part,
    between parts, and out of the last.
    """

    def __init__(self, parts: Sequence[ModelBlocks], *, codec: str = "none") -> None:
        self._parts = tuple(parts)
        self._codec = codec
        # Blocks are not thread-safe: one thread runs them for all sessions.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="nesa-blocks")

    @asynccontextmanager
    async def open_session(
        self, span: Span, *, rows: int, max_tokens: int, prefix: SessionPrefix | None = None
    ) -> AsyncIterator[BlockSession]:
        parts: list[ModelBlocks] = []
        at = span.start
        for part in self._parts:
            if part.span.start <= at < min(part.span.end, span.end):
                parts.append(part.select(Span(at, min(part.span.end, span.end))))
                at = parts[-1].span.end
        if at != span.end:
            raise MissingBlocksError([(at, span.end)], f"no local part holds block {at}")
        session = LocalSession(
            parts, self._worker, rows=rows, max_tokens=max_tokens, codec=self._codec
        )
        try:
            yield session
        finally:
            await session.close()

    def close(self) -> None:
        self._worker.shutdown()


def check_slices(
    rows: Sequence[RowSlice], lengths: Sequence[int], max_tokens: int, num_tokens: int
) -> None:
    """Raise `ValueError` for a step that does not continue the caches, or `CacheFullError`."""
    if len({part.row for part in rows}) != len(rows) or not rows:
        raise ValueError("a step names each of its rows once")
    if sum(part.count for part in rows) != num_tokens:
        raise ValueError(f"{num_tokens} hidden states for {[part.count for part in rows]} tokens")
    for part in rows:
        if part.count < 1 or part.position != lengths[part.row]:
            raise ValueError(f"row {part.row} holds {lengths[part.row]} tokens, step has {part}")
        if part.position + part.count > max_tokens:
            raise CacheFullError(
                f"row {part.row} would hold {part.position + part.count} tokens, the session was "
                f"opened for {max_tokens}: open it with a larger max_length"
            )
