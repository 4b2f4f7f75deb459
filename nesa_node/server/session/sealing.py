"""Seals of a session on this node: what came and went is hashed, and signed every few tokens.

T packed tokens, D hidden.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from functools import partial

import torch

from nesa_node.compression.codecs import EXACT, UNCOMPRESSED, allows_codec
from nesa_node.compression.tensors import DTYPE_NAMES, HiddenStates, TensorMeta, decode
from nesa_node.core.settings.choices import QuantType
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.swarm.protocol.messages import INT8_CACHE, Computation, Open, RowSlice
from nesa_node.swarm.protocol.seal_messages import (
    SEALED_SINCE,
    Seal,
    SealStatement,
    sealed_rows,
    sign_seal,
)
from nesa_node.verification.seal_tree import SessionSeals

SEAL_TOKENS = 32
"""Tokens of all rows from seal to seal."""
OFF_LOOP_BYTES = 512 * 1024
"""Size from which on hidden states are hashed in a thread: a millisecond's work."""


def describe_computation(blocks: ModelBlocks, quant_type: QuantType) -> Computation:
    """What this node declares to compute with."""
    on_gpu = blocks.device.type == "cuda"
    return Computation(
        dtype=DTYPE_NAMES[blocks.dtype],  # type: ignore[arg-type]  # one that a model can have
        quantization=quant_type + (INT8_CACHE if blocks.cache_dtype == "int8" else ""),
        backend=torch.cuda.get_device_name(blocks.device)[:64] if on_gpu else "cpu",
    )


class SessionSealer:
    """The seals of one session. It hashes nothing for clients that know no seals."""

    def __init__(self, identity: Identity, opened: Open, computation: Computation) -> None:
        self.nonce = secrets.token_bytes(16)
        self.computation = computation
        self._identity = identity
        self._opened = opened
        self._seals = (
            SessionSeals(opened.secret, opened.rows) if opened.version >= SEALED_SINCE else None
        )
        self._unsealed_tokens = 0
        self._number = 0
        self._cuts = 0
        # Rounded to the session's dtype, outputs are not what was computed.
        self._is_exact = opened.dtype == computation.dtype

    @property
    def is_due(self) -> bool:
        return self._unsealed_tokens >= SEAL_TOKENS

    async def add_inputs(self, rows: Sequence[RowSlice], hidden: HiddenStates) -> None:
        """Add what came, [T, D] as decoded, of consecutive positions of each row."""
        if self._seals is not None:
            await self._add(self._seals.add_inputs, rows, hidden)
            self._unsealed_tokens += hidden.num_tokens

    async def add_outputs(
        self, rows: Sequence[RowSlice], meta: TensorMeta, payload: bytes | bytearray | memoryview
    ) -> None:
        """Add what went, as its receiver decodes it; nothing, or all tokens of `rows`."""
        if self._seals is None or not meta.shape[0]:
            return
        if meta.codec == UNCOMPRESSED:
            sent = HiddenStates(meta, memoryview(payload))
        else:
            # Kept for all of the session: which rows have these outputs is not followed.
            self._is_exact &= allows_codec(EXACT, meta.codec)
            decoding = partial(decode, meta, payload, max_bytes=meta.max_nbytes)
            is_quick = meta.decoded_nbytes < OFF_LOOP_BYTES
            decoded_TD = decoding() if is_quick else await asyncio.to_thread(decoding)
            sent = HiddenStates.from_tensor(decoded_TD)
        await self._add(self._seals.add_outputs, rows, sent)

    async def _add(
        self,
        add: Callable[[int, int, bytes | memoryview, int], None],
        rows: Sequence[RowSlice],
        hidden: HiddenStates,
    ) -> None:
        def add_all() -> None:
            values = memoryview(hidden.payload).cast("B")
            size, start = len(values) // hidden.num_tokens, 0
            for part in rows:
                end = start + part.count * size
                add(part.row, part.position, values[start:end], part.count)
                start = end

        if hidden.nbytes < OFF_LOOP_BYTES:
            add_all()
        else:
            await asyncio.to_thread(add_all)

    def truncate(self, lengths: Sequence[int]) -> None:
        if self._seals is not None:
            self._cuts += 1
            self._seals.truncate(lengths)

    def reorder(self, sources: Sequence[int]) -> None:
        if self._seals is not None:
            self._cuts += 1
            self._seals.reorder(sources)

    def make_seal(self, epoch: int, *, requested: bool = False) -> Seal:
        """Sign what the rows hold now. Not for clients that know no seals."""
        assert self._seals is not None
        self._unsealed_tokens = 0
        self._number += 1
        statement = SealStatement(
            version=1,
            node=self._identity.peer_id,
            session=self._opened.session,
            nonce=self.nonce,
            epoch=epoch,
            number=self._number,
            blocks=self._opened.blocks,
            computation=self.computation,
            rows=sealed_rows(self._seals.roots()),
            # Not the epoch: that begins before the rows are cut, and a seal may fall between.
            cuts=self._cuts,
            adapter=self._opened.adapter,
            is_exact=self._is_exact,
        )
        return sign_seal(self._identity, statement, requested=requested)
