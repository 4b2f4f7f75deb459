"""Protocols of sessions and of connections that open them; a session's keys of prefix caches.

T packed tokens, D hidden.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from nesa_node.core.ids import PeerId, Span
from nesa_node.core.metrics import MetricSample
from nesa_node.core.settings.noise_spec import NoiseSpec
from nesa_node.privacy.noise.gaussian_mechanism import compose_epsilon
from nesa_node.routing.chains import Hop
from nesa_node.swarm.protocol.messages import (
    MAX_PREFIX_DIGESTS,
    PREFIX_TOKENS,
    Opened,
    Prefix,
    RowSlice,
    Want,
)
from nesa_node.verification.distributions import ComputeLogits

SALT_BYTES = 32
UNKNOWN_TOKEN = -1
"""Stands for a position that got a hidden state as input."""

ComputeInputs = Callable[[Sequence[RowSlice]], Awaitable[torch.Tensor]]
"""Computes the inputs [T, D] of a session's blocks for the given tokens of its prompt."""


@dataclass(slots=True, kw_only=True)
class SessionPrefix:
    """Prompt of a session: `tokens[row]` without padding; `final_tokens` is what rows hold at the
    end. If it is empty, nodes keep nothing for later sessions.

    Nodes see only digests of pages. Without the salt, which they never see, prompts cannot be
    guessed by trial.
    """

    salt: bytes = field(repr=False)
    tokens: Sequence[Sequence[int]] = field(repr=False)
    compute_inputs: ComputeInputs
    final_tokens: list[Sequence[int]] = field(default_factory=list, repr=False)

    def prompt_digests(self, model: str, precision: str) -> Prefix:
        """Digests of the prompt's pages without its last token, since its output is needed."""
        return _row_digests([tokens[:-1] for tokens in self.tokens], self.salt, model, precision)

    def final_digests(self, model: str, precision: str) -> Prefix:
        return _row_digests(self.final_tokens, self.salt, model, precision)


def derive_scope_salt(salt: bytes, scope: str) -> bytes:
    """Salt for sessions of one `scope`, which share prefixes only among themselves; "": `salt`."""
    return hashlib.blake2b(scope.encode(), key=salt).digest()[:SALT_BYTES] if scope else salt


def rekey_for_peer(prefix: Prefix, peer: PeerId) -> Prefix:
    """Digests for one node only: nodes that compare theirs find nothing in common."""
    key = hashlib.blake2b(peer.encode()).digest()
    return tuple(tuple(_keyed_hash(key, digest) for digest in digests) for digests in prefix)


def _row_digests(rows: Sequence[Sequence[int]], salt: bytes, model: str, precision: str) -> Prefix:
    """Digests of each row's full pages, as many as fit into a message."""
    root = _keyed_hash(salt, f"nesa prefix 1\n{model}\n{precision}".encode())
    pages = MAX_PREFIX_DIGESTS // max(len(rows), 1)
    return tuple(_page_digests(tokens[: pages * PREFIX_TOKENS], salt, root) for tokens in rows)


def _page_digests(tokens: Sequence[int], salt: bytes, digest: bytes) -> tuple[bytes, ...]:
    digests = []
    for start in range(0, len(tokens) - PREFIX_TOKENS + 1, PREFIX_TOKENS):
        page = tokens[start : start + PREFIX_TOKENS]
        if UNKNOWN_TOKEN in page:
            break
        digest = _keyed_hash(salt, digest + struct.pack(f"<{PREFIX_TOKENS}q", *page))
        digests.append(digest)
    return tuple(digests)


def _keyed_hash(salt: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, key=salt, digest_size=16).digest()


class PrefixStart:
    """Position from which each row's tokens are replayable: those before are in prefix caches.

    The client keeps all inputs. No node keeps outputs of reused tokens, so that a node which joins
    later and holds fewer of them cannot be filled by its neighbour: then all nodes go back to what
    that node holds.
    """

    def __init__(self, rows: int, prefix: Prefix = ()) -> None:
        self.start_lengths = [0] * rows
        self.prefix = prefix
        """Digests that are sent to nodes, which look for them in their prefix caches."""
        self.is_behind = False
        """Whether nodes lag behind the session, until a step completes."""

    def held_tokens(self, opened: Opened | None) -> tuple[int, ...]:
        """Tokens of each row that a node reports as reused, at most those that were announced."""
        if opened is None or not self.prefix or len(opened.held) != len(self.prefix):
            return (0,) * len(self.start_lengths)
        return tuple(
            min(held, PREFIX_TOKENS * len(digests))
            for held, digests in zip(opened.held, self.prefix, strict=True)
        )

    def agree_on_start(
        self, new_held: Sequence[Sequence[int]], lengths: Sequence[int] | None, *, all_new: bool
    ) -> bool:
        """Lower `start` to what all nodes hold; return whether the whole chain must go back.

        `new_held` has the tokens per row that each new node holds. `all_new` says that the chain
        has new nodes only. `lengths` are the session's lengths, None before its first step.
        """
        start = self.start_lengths
        floor = list(new_held[0]) if all_new and new_held else list(start)
        for held in (*new_held, *([] if lengths is None else [lengths])):
            floor = [min(pair) for pair in zip(floor, held, strict=True)]
        goes_back = self.is_behind or any(new < old for new, old in zip(floor, start, strict=True))
        self.start_lengths = floor
        self.is_behind = goes_back or (all_new and lengths is not None and floor != list(lengths))
        return goes_back

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget tokens from `lengths` on, and the digests of pages that reach beyond."""
        self.start_lengths = [min(pair) for pair in zip(self.start_lengths, lengths, strict=True)]
        self.prefix = tuple(
            digests[: length // PREFIX_TOKENS]
            for digests, length in zip(self.prefix, lengths, strict=bool(self.prefix))
        )

    def reorder(self, sources: Sequence[int]) -> None:
        """Let each row continue row `sources[row]`."""
        self.start_lengths = [self.start_lengths[source] for source in sources]
        if self.prefix:
            self.prefix = tuple(self.prefix[source] for source in sources)


MAX_SESSION_FAILOVERS = 20
"""Most records kept of one session, the newest."""


@dataclass(frozen=True, slots=True)
class Failover:
    """Replacement of the nodes `lost`, complete at `at` (Unix time) after `took_ms`."""

    at: float
    lost: tuple[PeerId, ...]
    took_ms: float


@dataclass(frozen=True, slots=True)
class DrawnAudits:
    """Nodes of a session when it was closed, and those whose work was drawn to be audited."""

    hops: int = 0
    drawn: int = 0

    def __add__(self, other: DrawnAudits) -> DrawnAudits:
        return DrawnAudits(self.hops + other.hops, self.drawn + other.drawn)


@dataclass(slots=True)
class NoisyVectors:
    """Hidden states that nodes got, each with noise of its own, also where two are of one token."""

    noise: NoiseSpec
    count: int = 0

    @property
    def epsilon(self) -> float:
        """Of all together, at the delta that each has by itself."""
        if not self.count:
            return 0.0
        return compose_epsilon(self.noise.epsilon, self.noise.delta, self.count)

    def __add__(self, other: NoisyVectors) -> NoisyVectors:
        assert self.noise == other.noise, "one client has one setting of noise"
        return NoisyVectors(self.noise, self.count + other.count)


__all__ = ["BlockSession", "Connect", "RowSlice", "SwarmConnection", "Want"]


class BlockSession(Protocol):
    """KV caches of `rows` sequences in a span of blocks.

    One call at a time: a step ends before the next call.
    """

    @property
    def rows(self) -> int: ...

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens that each row's cache holds."""
        ...

    @property
    def max_tokens(self) -> int:
        """Tokens per row that every hop has reserved."""
        ...

    @property
    def hops(self) -> tuple[Hop, ...]:
        """The current chain; it changes when a node is replaced."""
        ...

    @property
    def codecs(self) -> tuple[str, ...]:
        """Codec of the last step's hidden states on each stream; empty without streams."""
        ...

    @property
    def failovers(self) -> tuple[Failover, ...]:
        """The last replacements of nodes."""
        return ()

    @property
    def session_id(self) -> bytes:
        """Id by which decisions about the session are logged; empty where none are."""
        return b""

    @property
    def num_decoding(self) -> int:
        """Most sessions that decoded at a node of the last step, this one included; 0: unknown."""
        return 0

    @property
    def drawn_audits(self) -> DrawnAudits:
        """What is audited of a closed session; of an open one it is not told."""
        return DrawnAudits()

    @property
    def noisy_vectors(self) -> NoisyVectors | None:
        """All hidden states that nodes got, where noise was put in; None: without."""
        return None

    async def step(
        self, hidden_TD: torch.Tensor, rows: Sequence[RowSlice], *, want: Want = "all"
    ) -> torch.Tensor:
        """Run packed tokens through the span, after those that the caches hold.

        `hidden_TD` holds the slices in the order of `rows` (T is the sum of their counts, each row
        at most once) and is not modified. Each slice's `position` must equal its row's length;
        other rows are unchanged. Returns [T, D], with `want="last"` only the last token of each
        slice, [len(rows), D], and with `want="none"` [0, D], in the dtype of `hidden_TD`. Raises
        `CacheFullError` beyond `max_tokens`, before anything is sent.
        """
        ...

    async def rollback(self, lengths: Sequence[int]) -> None:
        """Remove each row's tokens beyond `lengths[row]`, which must not exceed its length."""
        ...

    async def reorder(self, sources: Sequence[int]) -> None:
        """Let each row continue as a copy of row `sources[row]`, for beam search."""
        ...

    async def finish(self) -> None:
        """Close, and wait for audits of its work, but not for long.

        Raises `WrongActivationsError` where they fail: what the session computed is not to be used.
        """
        ...

    async def close(self) -> None:
        """Release the caches on every hop. Idempotent."""
        ...


class SwarmConnection(Protocol):
    """Membership in the swarm that opens sessions. For one event loop."""

    def open_session(
        self,
        span: Span,
        *,
        rows: int,
        max_tokens: int,
        prefix: SessionPrefix | None = None,
        adapter: bytes = b"",
    ) -> AbstractAsyncContextManager[BlockSession]:
        """Open a session over the blocks of `span` for up to `max_tokens` tokens in each of `rows`
        rows, with the adapter of that digest, if it is not empty.

        With a `prefix` its rows may start with some of those tokens, see `lengths`. Entering raises
        `ContextLengthError` where no route can hold that many tokens per row and
        `MissingBlocksError` where blocks stay without a node. Leaving closes the session. One task
        enters and leaves it; steps may come from other tasks, one at a time. After a cancelled step
        the session can only be left.
        """
        ...

    @property
    def is_lost(self) -> bool:
        """Whether the swarm must be joined again before the next session. Thread-safe."""
        return False

    def samples(self) -> Iterable[MetricSample]:
        """Prometheus samples of the connection. Thread-safe."""
        return ()


Connect = Callable[[ComputeLogits], AbstractAsyncContextManager[SwarmConnection]]
"""Joins the swarm; gets the model's head. One task enters and leaves it, the latter after all
sessions."""
