"""Prefix-cache keys of a session: salted digests of its prompts' pages.

Nodes see only digests. Without the salt, which they never see, prompts cannot be guessed by trial.

T packed tokens, D hidden.
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
"""Stands for a position that got a hidden state as input."""

Inputs = Callable[[Sequence[RowSlice]], Awaitable[torch.Tensor]]
"""Computes the inputs [T, D] of a session's blocks for the given tokens of its prompt."""


@dataclass(slots=True, kw_only=True)
class SessionPrefix:
    """Prompt of a session: `tokens[row]` without padding; `left` is what rows hold at the end.

    If `left` is empty, nodes keep nothing for later sessions.
    """

    salt: bytes = field(repr=False)
    tokens: Sequence[Sequence[int]] = field(repr=False)
    inputs: Inputs
    left: list[Sequence[int]] = field(default_factory=list, repr=False)

    def announced(self, model: str, precision: str) -> Prefix:
        """Digests of the prompt's pages without its last token, since its output is needed."""
        return _digests([tokens[:-1] for tokens in self.tokens], self.salt, model, precision)

    def leaves(self, model: str, precision: str) -> Prefix:
        """Digests of the pages that rows hold at the end."""
        return _digests(self.left, self.salt, model, precision)


def scoped(salt: bytes, scope: str) -> bytes:
    """Salt for sessions of one `scope`, which share prefixes only among themselves; "": `salt`."""
    return hashlib.blake2b(scope.encode(), key=salt).digest()[:SALT_BYTES] if scope else salt


def for_peer(prefix: Prefix, peer: PeerId) -> Prefix:
    """Digests for one node only: nodes that compare theirs find nothing in common."""
    key = hashlib.blake2b(peer.encode()).digest()
    return tuple(tuple(_keyed(key, digest) for digest in digests) for digests in prefix)


def _digests(rows: Sequence[Sequence[int]], salt: bytes, model: str, precision: str) -> Prefix:
    """Digests of each row's full pages, as many as fit into a message."""
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
