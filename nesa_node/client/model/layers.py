"""Layers of a client's model: sessions over consecutive spans, some in the client's own process.

Local sessions run the blocks that a client keeps (`client_blocks`), and whole models in tests and
in `evaluation`, which emulates a swarm's codecs.

T packed tokens, D hidden, B rows, L columns of new tokens, K kept columns, V vocabulary.
"""

from __future__ import annotations

import asyncio
import itertools
import operator
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial, reduce

import torch

from nesa_node.client.session.base import (
    BlockSession,
    DrawnAudits,
    Failover,
    NoisyVectors,
    RowSlice,
    SessionPrefix,
    SwarmConnection,
    Want,
)
from nesa_node.compression.tensors import decode, encode
from nesa_node.core.errors import CacheFullError, MissingBlocksError, UnsupportedFeatureError
from nesa_node.core.ids import PeerId, Span
from nesa_node.engine.cache.pages import PAGE_TOKENS, pages_for
from nesa_node.engine.model.blocks import ModelBlocks, RowChunk
from nesa_node.routing.chains import Hop


class LayeredSession:
    """`BlockSession` over `layers`, which steps pass in order. Their lengths are equal."""

    def __init__(self, layers: Sequence[BlockSession]) -> None:
        if not layers:
            raise ValueError("a session needs at least one layer")
        self._layers = tuple(layers)
        self.rows = layers[0].rows
        self.max_tokens = min(layer.max_tokens for layer in layers)

    @property
    def lengths(self) -> tuple[int, ...]:
        return self._layers[0].lengths

    @property
    def hops(self) -> tuple[Hop, ...]:
        return tuple(hop for layer in self._layers for hop in layer.hops)

    @property
    def codecs(self) -> tuple[str, ...]:
        return tuple(codec for layer in self._layers for codec in layer.codecs)

    @property
    def failovers(self) -> tuple[Failover, ...]:
        return tuple(loss for layer in self._layers for loss in layer.failovers)

    @property
    def session_id(self) -> bytes:
        return next((layer.session_id for layer in self._layers if layer.session_id), b"")

    @property
    def num_decoding(self) -> int:
        return max(layer.num_decoding for layer in self._layers)

    @property
    def drawn_audits(self) -> DrawnAudits:
        return sum((layer.drawn_audits for layer in self._layers), DrawnAudits())

    @property
    def noisy_vectors(self) -> NoisyVectors | None:
        sent = [each for layer in self._layers if (each := layer.noisy_vectors) is not None]
        return reduce(operator.add, sent) if sent else None

    async def step(
        self, hidden_TD: torch.Tensor, rows: Sequence[RowSlice], *, want: Want = "all"
    ) -> torch.Tensor:
        # Later layers attend to every token: only the last one may omit outputs.
        for layer in self._layers[:-1]:
            hidden_TD = await layer.step(hidden_TD, rows)
        return await self._layers[-1].step(hidden_TD, rows, want=want)

    async def rollback(self, lengths: Sequence[int]) -> None:
        for layer in self._layers:
            await layer.rollback(lengths)

    async def reorder(self, sources: Sequence[int]) -> None:
        for layer in self._layers:
            await layer.reorder(sources)

    async def finish(self) -> None:
        await self.close()
        for layer in self._layers:
            await layer.finish()

    async def close(self) -> None:
        for layer in self._layers:
            await layer.close()


@asynccontextmanager
async def open_layers(
    layers: Sequence[tuple[SwarmConnection, Span]],
    *,
    rows: int,
    max_tokens: int,
    prefix: SessionPrefix | None = None,
    adapter: bytes = b"",
) -> AsyncIterator[BlockSession]:
    """Open one session over consecutive spans, each by its own connection; empty spans are skipped.

    Raises what the connections raise, after closing what was opened. Only the last layer can reuse
    a `prefix`, since a later layer would lack the reused tokens' outputs; the layers before it
    compute the prefix.
    """
    layers = [(connection, span) for connection, span in layers if len(span)]
    sessions: list[BlockSession] = []
    async with AsyncExitStack() as stack:
        for connection, span in layers:
            is_last = len(sessions) == len(layers) - 1
            its = _prefix_after(sessions, prefix) if prefix is not None and is_last else None
            opening = connection.open_session(
                span, rows=rows, max_tokens=max_tokens, prefix=its, adapter=adapter
            )
            sessions.append(await stack.enter_async_context(opening))
        yield sessions[0] if len(sessions) == 1 else LayeredSession(sessions)


def _prefix_after(sessions: Sequence[BlockSession], prefix: SessionPrefix) -> SessionPrefix:
    """`prefix` for a session that follows `sessions`: its inputs pass through those first."""
    # A copy: a session reachable from its own prefix would outlive its context.
    earlier = tuple(sessions)

    async def inputs(slices: Sequence[RowSlice]) -> torch.Tensor:
        hidden_TD = await prefix.compute_inputs(slices)
        for session in earlier:
            hidden_TD = await session.step(hidden_TD, slices)
        return hidden_TD

    return replace(prefix, compute_inputs=inputs)


HiddenStateSelection = bool | int | Sequence[int] | None
"""`output_hidden_states` as in transformers: all, none, or those of the given indices."""


def selected_indices(selection: HiddenStateSelection, num_blocks: int) -> frozenset[int]:
    """Indices among `num_blocks + 1` hidden states that `selection` selects; empty if it is false.

    Index 0 is the first block's input, index i the output of block i - 1. Negative indices count
    from the end. Raises `ValueError` for an index out of range.
    """
    states = num_blocks + 1
    if not selection:
        return frozenset()
    if selection is True:
        return frozenset(range(states))
    indices = [selection] if isinstance(selection, int) else list(selection)
    if wrong := [index for index in indices if not -states <= index < states]:
        raise ValueError(
            f"output_hidden_states={selection}: there are {states} hidden states, none is "
            f"{wrong[0]}; use 0 to {num_blocks}, or True for all"
        )
    return frozenset(index % states for index in indices)


async def run_block_outputs(
    layers: Sequence[tuple[SwarmConnection, Span]],
    hidden_TD: torch.Tensor,
    slices: Sequence[RowSlice],
    wanted: Collection[int],
) -> dict[int, torch.Tensor]:
    """Run whole texts through `layers`; return the `wanted` hidden states by index.

    Nodes send only what the last block of a session returns, but a session may cover any part of a
    node's span. Each part that ends at a wanted hidden state has a session of its own, closed
    before the next one opens: a session never holds cache while another waits for it.

    `wanted` are indices as in `selected_indices`. The last block's output and index 0 are always
    among the results, each [T, D] in the dtype of `hidden_TD`. `slices` begin at position 0. Raises
    what `SwarmConnection.open_session`, `BlockSession.step` and `BlockSession.finish` raise.
    """
    rows = max(part.row for part in slices) + 1
    max_tokens = max(part.count for part in slices)
    states = {0: hidden_TD}
    for connection, span in _split_at_wanted(layers, wanted):
        opening = connection.open_session(span, rows=rows, max_tokens=max_tokens)
        async with opening as session:
            hidden_TD = await session.step(hidden_TD, slices)
            await session.finish()
        states[span.end] = hidden_TD
    return states


def _split_at_wanted(
    layers: Sequence[tuple[SwarmConnection, Span]], wanted: Collection[int]
) -> Iterator[tuple[SwarmConnection, Span]]:
    """Spans of `layers`, split at each wanted hidden state."""
    for connection, span in layers:
        inner = sorted(cut for cut in wanted if span.start < cut < span.end)
        for start, end in itertools.pairwise([span.start, *inner, span.end]):
            yield connection, Span(start, end)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Padded batch, of which rows are sent without padding; `sent_BL=None`: all columns are."""

    row_ids: Sequence[torch.Tensor]
    sent_BL: torch.Tensor | None
    columns: int

    def choose_want(self, logits_to_keep: int | torch.Tensor) -> Want:
        """ "last" if the kept columns need only the last token of each row, else "all"."""
        if isinstance(logits_to_keep, torch.Tensor) or (logits_to_keep != 1 and self.columns != 1):
            return "all"
        every_row_ends_here = self.sent_BL is None or bool(self.sent_BL[:, -1].all())
        return "last" if every_row_ends_here else "all"

    def logits(
        self,
        hidden_TD: torch.Tensor,
        want: Want,
        logits_to_keep: int | torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Logits [B, K, V] of the kept columns; zeros in columns that were not sent.

        `hidden_TD` is the output of a step with `want`. `logits_to_keep` is as in transformers'
        `forward`: the number of last columns, 0 for all, or a tensor of column indices.
        """
        kept = (
            logits_to_keep
            if isinstance(logits_to_keep, torch.Tensor)
            else slice(-logits_to_keep if logits_to_keep else None, None)
        )
        if want == "last":
            logits_BKV = head(hidden_TD).unsqueeze(1)
        elif self.sent_BL is None:
            hidden_BKD = hidden_TD.view(len(self.row_ids), self.columns, -1)[:, kept]
            logits_TV = head(hidden_BKD.flatten(0, 1))
            logits_BKV = logits_TV.view(*hidden_BKD.shape[:2], logits_TV.shape[-1])
        else:
            index_BL = self.sent_BL.flatten().cumsum(0).view_as(self.sent_BL) - 1
            sent_BK = self.sent_BL[:, kept]
            logits_TV = head(hidden_TD[index_BL[:, kept][sent_BK].to(hidden_TD.device)])
            logits_BKV = logits_TV.new_zeros((*sent_BK.shape, logits_TV.shape[-1]))
            logits_BKV[sent_BK.to(logits_BKV.device)] = logits_TV
        # Blocks and head run in inference mode; callers may modify the result in place.
        return logits_BKV.clone() if logits_BKV.is_inference() else logits_BKV


def pack(
    ids_BL: torch.Tensor, mask_BL: torch.Tensor | None, skip: Sequence[int] | None = None
) -> PackedBatch:
    """Pack the columns that `mask_BL` shows (nonzero), less each row's first `skip[row]` tokens."""
    if mask_BL is not None and bool(mask_BL.all()):
        mask_BL = None
    if mask_BL is None and not (skip and any(skip)):
        return PackedBatch(ids_BL.unbind(0), None, ids_BL.shape[1])
    sent_BL = torch.ones_like(ids_BL, dtype=torch.bool) if mask_BL is None else mask_BL != 0
    if skip is not None:
        start_B = torch.tensor(skip, device=sent_BL.device)
        sent_BL = sent_BL & (sent_BL.cumsum(1) > start_B.unsqueeze(1))
    row_ids = [ids_L[sent_L] for ids_L, sent_L in zip(ids_BL, sent_BL, strict=True)]
    return PackedBatch(row_ids, sent_BL, ids_BL.shape[1])


def check_mask(mask_BC: torch.Tensor | None, columns: int) -> None:
    """Raise `UnsupportedFeatureError` or `ValueError` for a mask of another shape."""
    if mask_BC is None:
        return
    if mask_BC.ndim != 2:
        raise UnsupportedFeatureError(
            "attention_mask must be [rows, columns] of 0 and 1: other masks cannot be sent"
        )
    if mask_BC.shape[1] != columns:
        raise ValueError(
            f"attention_mask has {mask_BC.shape[1]} columns, cache and input have {columns}"
        )


CLIENT_PEER = PeerId("client")
"""Peer id of this process in `hops`."""


class LocalSession:
    """`BlockSession` of `rows` sequences in consecutive spans of blocks of this process."""

    codecs = ()
    failovers = ()
    session_id = b""
    num_decoding = 0
    drawn_audits = DrawnAudits()
    noisy_vectors = None

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
        self._caches = [part.new_pool(pages * PAGE_TOKENS).reserve(pages) for part in parts]
        self._tables = [[cache.new_table() for _ in range(rows)] for cache in self._caches]
        self._lengths = [0] * rows
        self.rows = rows
        self.max_tokens = max_tokens

    @property
    def hops(self) -> tuple[Hop, ...]:
        return tuple(Hop(CLIENT_PEER, part.span) for part in self._parts)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self._lengths)

    async def step(
        self, hidden_TD: torch.Tensor, rows: Sequence[RowSlice], *, want: Want = "all"
    ) -> torch.Tensor:
        check_slices(rows, self._lengths, self.max_tokens, hidden_TD.shape[0])
        run = partial(copy_context().run, self._run, hidden_TD, rows, want)
        result = await asyncio.get_running_loop().run_in_executor(self._worker, run)
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
        for cache, tables in zip(self._caches, self._tables, strict=True):
            cache.reorder(tables, sources)
        self._lengths = [self._lengths[source] for source in sources]

    async def finish(self) -> None:
        await self.close()

    async def close(self) -> None:
        for cache in self._caches:
            cache.close()
        self._caches, self._tables = [], []

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
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="nesa-blocks")

    def find_parts(self, span: Span) -> list[ModelBlocks]:
        """Blocks of `span`, part by part. Raises `MissingBlocksError`."""
        parts: list[ModelBlocks] = []
        at = span.start
        for part in self._parts:
            if part.span.start <= at < min(part.span.end, span.end):
                parts.append(part.select(Span(at, min(part.span.end, span.end))))
                at = parts[-1].span.end
        if at != span.end:
            raise MissingBlocksError([(at, span.end)], f"no local part holds block {at}")
        return parts

    @asynccontextmanager
    async def open_session(
        self,
        span: Span,
        *,
        rows: int,
        max_tokens: int,
        prefix: SessionPrefix | None = None,
        adapter: bytes = b"",
    ) -> AsyncIterator[BlockSession]:
        if adapter:
            raise UnsupportedFeatureError("an adapter needs all blocks in the swarm")
        parts = self.find_parts(span)
        session = LocalSession(
            parts, self.worker, rows=rows, max_tokens=max_tokens, codec=self._codec
        )
        try:
            yield session
        finally:
            await session.close()

    def close(self) -> None:
        self.worker.shutdown()


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
