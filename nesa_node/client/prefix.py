"""What a session is going to be fed first, so that nodes that still hold some of it need not be.

Nodes are told digests only. Without the salt, which they never see, nobody can find out by trying
what a prompt may have been.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import torch

from nesa_node.core.ids import PeerId
from nesa_node.swarm.messages import MAX_DIGESTS, PREFIX_TOKENS, Prefix, RowSlice

SALT_BYTES = 32
UNKNOWN_TOKEN = -1
"""Stands for a position that was fed as a hidden state."""

Inputs = Callable[[Sequence[RowSlice]], Awaitable[torch.Tensor]]
"""Hidden states [T, D] that go into a session's blocks for these tokens of its prompt."""


@dataclass(slots=True, kw_only=True)
class SessionPrefix:
    """`tokens[row]` is what comes first, without padding; `left` what the rows hold at the end.

    `left` is empty where that is not known, and then nothing is left for later sessions.
    """

    salt: bytes = field(repr=False)
    tokens: Sequence[Sequence[int]] = field(repr=False)
    inputs: Inputs
    left: list[Sequence[int]] = field(default_factory=list, repr=False)

    def announced(self, model: str, precision: str) -> Prefix:
        """Digests of what comes first, without the last token: of that an output is wanted."""
        return _digests([tokens[:-1] for tokens in self.tokens], self.salt, model, precision)

    def leaves(self, model: str, precision: str) -> Prefix:
        """Digests of what the rows hold at the end."""
        return _digests(self.left, self.salt, model, precision)


def scoped(salt: bytes, scope: str) -> bytes:
    """A salt for the sessions of one `scope` only, which share nothing with others; "": `salt`."""
    return hashlib.blake2b(scope.encode(), key=salt).digest()[:SALT_BYTES] if scope else salt


def for_peer(prefix: Prefix, peer: PeerId) -> Prefix:
    """The same prefix for one node only: two that compare theirs see nothing in common."""
    key = hashlib.blake2b(peer.encode()).digest()
    return tuple(tuple(_keyed(key, digest) for digest in digests) for digests in prefix)


def _digests(rows: Sequence[Sequence[int]], salt: bytes, model: str, precision: str) -> Prefix:
    """One for each full page of each row, as many as fit into a message."""
    root = _keyed(salt, f"nesa prefix 1\n{model}\n{precision}".encode())
    pages = MAX_DIGESTS // max(len(rows), 1)
    return tuple(_chain(tokens[: pages * PREFIX_TOKENS], salt, root) for tokens in rows)


def _chain(tokens: Sequence[int], salt: bytes, digest: bytes) -> tuple[bytes, ...]:
    digests = []
    for start in range(0, len(tokens) - PREFIX_TOKENS + 1, PREFIX_TOKENS):
        page = tokens[start : start + PREFIX_TOKENS]
        if UNKNOWN_TOKEN in page:
            break
        digest = _keyed(salt, digest + struct.pack(f"<{PREFIX_TOKENS}q", *page))
        digests.append(digest)
    return tuple(digests)


def _keyed(salt: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, key=salt, digest_size=16).digest()
