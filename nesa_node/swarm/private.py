"""A swarm for those who know its key.

libp2p's daemon as hivemind ships it has no flag for a pre-shared key, so membership is proved one
layer up, three times over: every DHT call and answer carries an HMAC that names both ends, the keys
and records on the DHT are derived and tagged with the swarm key, and a session is opened with
`membership_proof`. Somebody without the key cannot read or write the DHT, nor open a session.

What this does not hide: that this machine runs a nesa-node, and who talks with whom, how much and
when (libp2p tells everyone which protocols a peer speaks, and its own peer routing where a peer
is). The key is one for all: whoever had it once is a member until all others change it.
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
    """What a node can prove with its swarm key; `Membership(None)` is the public network."""

    def __init__(self, swarm_key: str | None) -> None:
        self._key = None if swarm_key is None else _stretch(swarm_key)

    @property
    def is_private(self) -> bool:
        return self._key is not None

    def dht_key(self, name: str) -> str:
        """The key under which `name` is found on the DHT."""
        if self._key is None:
            return name
        return "private/" + _hmac(self._key, b"dht-key", name.encode()).hex()

    def tag(self, purpose: bytes, *parts: bytes) -> bytes:
        """32 bytes that only members can make; empty on the public network."""
        return b"" if self._key is None else _hmac(self._key, purpose, *parts)

    def check(self, tag: bytes, purpose: bytes, *parts: bytes) -> bool:
        return hmac.compare_digest(tag, self.tag(purpose, *parts))


def membership_proof(
    swarm_key: str | None, session_id: SessionId, prover: PeerId, verifier: PeerId
) -> bytes:
    """What `prover` sends to `verifier` when a session opens; empty without a swarm key.

    It holds for this session and this pair only, in this direction: a node that receives one can
    use it nowhere else, nor send it back as its own.
    """
    return Membership(swarm_key).tag(
        b"session", bytes(session_id), prover.encode(), verifier.encode()
    )


def verify_membership(
    swarm_key: str | None, proof: bytes, session_id: SessionId, prover: PeerId, verifier: PeerId
) -> bool:
    """Whether `prover` knows the swarm key. On the public network only an empty proof is right."""
    return hmac.compare_digest(proof, membership_proof(swarm_key, session_id, prover, verifier))


@lru_cache(maxsize=8)
def _stretch(swarm_key: str) -> bytes:
    """A key from a phrase, slowly: who saw a tag could otherwise try whole dictionaries."""
    if len(swarm_key) < MIN_KEY_CHARS:
        raise ConfigError(
            f"the swarm key needs at least {MIN_KEY_CHARS} characters; "
            "`python -c 'import secrets; print(secrets.token_urlsafe(24))'` makes a good one"
        )
    return hashlib.scrypt(swarm_key.encode(), salt=_SALT, n=2**14, r=8, p=1, dklen=32)


def _hmac(key: bytes, purpose: bytes, *parts: bytes) -> bytes:
    digest = hmac.new(key, digestmod=hashlib.sha256)
    for part in (purpose, *parts):
        # Lengths first, so that no two lists of parts run together into the same bytes.
        digest.update(len(part).to_bytes(8) + part)
    return digest.digest()
