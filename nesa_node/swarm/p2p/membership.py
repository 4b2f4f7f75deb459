"""Membership in a private swarm, proved by a shared swarm key.

hivemind's p2pd has no flag for a pre-shared key, so membership is proved one layer up: every DHT
call and answer carries an HMAC that covers both peer ids, DHT keys are derived from the swarm key
and records tagged with it, and a session is opened with `membership_proof`. A peer without the key
can neither read nor write the DHT, nor open a session.

Not hidden: that this machine runs a nesa-node, and which peers communicate, how much and when
(libp2p tells any peer which protocols a peer speaks, and its own peer routing where a peer is). The
key is shared by all members: a peer that ever had it remains a member until it is changed
everywhere.
"""

from __future__ import annotations

import hashlib
import hmac
from functools import lru_cache

from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import PeerId, SessionId

TAG_BYTES = 32
MIN_KEY_CHARS = 12
_SALT = b"nesa-node swarm key 1"


class Membership:
    """Proofs made with a swarm key; `Membership(None)` is the public network."""

    def __init__(self, swarm_key: str | None) -> None:
        self._key = None if swarm_key is None else _derive_key(swarm_key)

    @property
    def is_private(self) -> bool:
        return self._key is not None

    def dht_key(self, name: str) -> str:
        """DHT key of `name`, derived from the swarm key in a private swarm."""
        if self._key is None:
            return name
        return "private/" + _hmac(self._key, b"dht-key", name.encode()).hex()

    def tag(self, purpose: bytes, *parts: bytes) -> bytes:
        """HMAC-SHA256 of `purpose` and `parts` under the swarm key; empty on the public network."""
        return b"" if self._key is None else _hmac(self._key, purpose, *parts)

    def check(self, tag: bytes, purpose: bytes, *parts: bytes) -> bool:
        return hmac.compare_digest(tag, self.tag(purpose, *parts))


def membership_proof(
    swarm_key: str | None, session_id: SessionId, prover: PeerId, verifier: PeerId
) -> bytes:
    """Proof that `prover` sends to `verifier` when a session opens; empty without a swarm key.

    It is valid for this session, this pair of peers and this direction only: its receiver can
    neither reuse it elsewhere nor send it back as its own.
    """
    return Membership(swarm_key).tag(
        b"session", bytes(session_id), prover.encode(), verifier.encode()
    )


def verify_membership(
    swarm_key: str | None, proof: bytes, session_id: SessionId, prover: PeerId, verifier: PeerId
) -> bool:
    """Whether `prover` knows the swarm key. On the public network only an empty proof is valid."""
    return hmac.compare_digest(proof, membership_proof(swarm_key, session_id, prover, verifier))


@lru_cache(maxsize=8)
def _derive_key(swarm_key: str) -> bytes:
    """Derive a key from a phrase by scrypt, slowly, against dictionary attacks on observed tags."""
    if len(swarm_key) < MIN_KEY_CHARS:
        raise ConfigError(
            f"the swarm key needs at least {MIN_KEY_CHARS} characters; "
            "`python -c 'import secrets; print(secrets.token_urlsafe(24))'` makes a good one"
        )
    return hashlib.scrypt(swarm_key.encode(), salt=_SALT, n=2**14, r=8, p=1, dklen=32)


def _hmac(key: bytes, purpose: bytes, *parts: bytes) -> bytes:
    digest = hmac.new(key, digestmod=hashlib.sha256)
    for part in (purpose, *parts):
        # Lengths first, so that different lists of parts never give the same bytes.
        digest.update(len(part).to_bytes(8) + part)
    return digest.digest()
