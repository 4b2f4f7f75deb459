"""Identity of a node (an Ed25519 key in a file), and membership in a private swarm (a shared key).

The file has the format of libp2p's daemon, a protobuf `PrivateKey`: for an Ed25519 key 4 constant
bytes of framing, the 32-byte seed and the 32-byte public key. An Ed25519 peer id is the base58 text
of an identity multihash over the protobuf `PublicKey`, so that a signature can be verified with
nothing but the signer's peer id.

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

import fcntl
import hashlib
import hmac
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from nesa_node.core.errors import ConfigError, IdentityError
from nesa_node.core.ids import PeerId, SessionId
from nesa_node.core.logging import get_logger
from nesa_node.core.settings.declaration import default_identity_path, user_path

log = get_logger(__name__)

_PRIVATE_KEY_HEADER = bytes.fromhex("08011240")
PEER_ID_HEADER = bytes.fromhex("002408011220")
"""Framing of the public key in an Ed25519 peer id."""
_KEY_BYTES = 32
_FILE_BYTES = len(_PRIVATE_KEY_HEADER) + 2 * _KEY_BYTES
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_MAX_PEER_ID_CHARS = 128


class Identity:
    """Key pair and the file that holds it. The private key never appears in `repr` or logs."""

    def __init__(self, private_key: Ed25519PrivateKey, path: Path) -> None:
        self._private_key = private_key
        self.path = path
        public = private_key.public_key().public_bytes_raw()
        self.peer_id = PeerId(base58_encode(PEER_ID_HEADER + public))

    def __repr__(self) -> str:
        return f"Identity(peer_id={self.peer_id!r}, path={str(self.path)!r})"

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Read the key file at `path`, or create one that only its owner can read.

        Only the default path's folder is created: a misspelt path raises `ConfigError`, instead of
        giving the node another peer id. Raises `IdentityError` if the file cannot be read or
        created, is readable by other users, or does not hold an Ed25519 key.
        """
        path = user_path(path).absolute()
        identity, made = cls._open(path)
        if made:
            log.info("identity_made", path=str(path), peer_id=identity.peer_id)
        return identity

    @classmethod
    def _open(cls, path: Path) -> tuple[Identity, bool]:
        """The identity at `path`, and whether this call created it. Raises as `load_or_create`."""
        try:
            made = not path.exists() and _create(path)
            return cls(_parse_private_key(_read_private(path), path), path), made
        except OSError as error:
            raise IdentityError(
                f"cannot use the identity file {path}: {error.strerror}; choose another one with "
                "--identity-path"
            ) from error

    @classmethod
    def ephemeral(cls, directory: Path) -> Identity:
        """Create an identity in a file of its own in `directory`, which the caller removes."""
        path = directory.absolute() / f"ephemeral-{secrets.token_hex(8)}.key"
        return cls._open(path)[0]

    def sign(self, data: bytes) -> bytes:
        """Sign `data`: 64 bytes that `verify(self.peer_id, data, ...)` accepts.

        Callers start `data` with a prefix for its purpose, so that a signature made for one purpose
        is invalid for any other.
        """
        return self._private_key.sign(data)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the key file. Raises `IdentityError` if another process holds the lock.

        Two daemons with one peer id would take each other's connections and records. The kernel
        releases the lock when the process ends, even after SIGKILL.
        """
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise IdentityError(
                    f"the identity {self.path} is in use by another nesa-node on this machine; "
                    "stop that one, or give this one its own file with --identity-path"
                ) from error
            yield
        finally:
            os.close(descriptor)


def verify_signature(peer_id: PeerId, data: bytes, signature: bytes) -> bool:
    """Whether the owner of `peer_id` signed `data`. False for ids that are not Ed25519 ids."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key_bytes(peer_id)).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def public_key_bytes(peer_id: PeerId) -> bytes:
    """The 32 bytes of the public key inside an Ed25519 peer id; `ValueError` for any other text."""
    raw = base58_decode(peer_id)
    if len(raw) != len(PEER_ID_HEADER) + _KEY_BYTES or not raw.startswith(PEER_ID_HEADER):
        raise ValueError(f"{peer_id[:_MAX_PEER_ID_CHARS]!r} is not an Ed25519 peer id")
    return raw[len(PEER_ID_HEADER) :]


def base58_encode(data: bytes) -> str:
    """Bitcoin's base58 alphabet; a leading zero byte becomes a leading `1`."""
    number = int.from_bytes(data)
    digits: list[str] = []
    while number:
        number, digit = divmod(number, 58)
        digits.append(_BASE58[digit])
    zeros = len(data) - len(data.lstrip(b"\0"))
    return "1" * zeros + "".join(reversed(digits))


def base58_decode(text: str) -> bytes:
    """The inverse of `base58_encode`; `ValueError` for foreign characters or an overlong text."""
    if len(text) > _MAX_PEER_ID_CHARS:
        raise ValueError("base58 text is too long for a peer id")
    number = 0
    for character in text:
        number = number * 58 + _BASE58.index(character)
    zeros = len(text) - len(text.lstrip("1"))
    return b"\0" * zeros + number.to_bytes((number.bit_length() + 7) // 8)


def _create(path: Path) -> bool:
    """Write a new key under a temporary name and link it to `path`.

    False if another process was faster. Raises `ConfigError` without a folder.
    """
    if path == default_identity_path().absolute():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    elif not path.parent.exists():
        raise ConfigError(
            f"cannot make the identity file {path}: there is no folder {path.parent}; make it, or "
            "correct --identity-path"
        )
    key = Ed25519PrivateKey.generate()
    content = _PRIVATE_KEY_HEADER + key.private_bytes_raw() + key.public_key().public_bytes_raw()
    # mkstemp creates the file exclusively and with mode 0600.
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(temporary)
    return True


def _read_private(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise IdentityError(f"the identity {path} is not a regular file")
        if mode & 0o077:
            raise IdentityError(
                f"the identity {path} can be read by other users (mode {stat.S_IMODE(mode):04o}); "
                f"run `chmod 600 {path}`, and make a new one if it may have been copied"
            )
        return os.read(descriptor, _FILE_BYTES + 1)
    finally:
        os.close(descriptor)


def _parse_private_key(content: bytes, path: Path) -> Ed25519PrivateKey:
    if len(content) == _FILE_BYTES and content.startswith(_PRIVATE_KEY_HEADER):
        body = content[len(_PRIVATE_KEY_HEADER) :]
        key = Ed25519PrivateKey.from_private_bytes(body[:_KEY_BYTES])
        if key.public_key().public_bytes_raw() == body[_KEY_BYTES:]:
            return key
    raise IdentityError(
        f"the identity {path} is damaged or not a libp2p Ed25519 key; remove it to get a new peer "
        "id, or choose another file with --identity-path"
    )


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


def adapter_proof(membership: Membership, prover: PeerId, verifier: PeerId) -> bytes:
    """Proof of `prover` in its requests for adapters to `verifier`; empty without a swarm key."""
    return membership.tag(b"adapter", prover.encode(), verifier.encode())


def verify_adapter_proof(
    membership: Membership, proof: bytes, prover: PeerId, verifier: PeerId
) -> bool:
    """Whether `prover` knows the swarm key. On the public network only an empty proof is valid."""
    return membership.check(proof, b"adapter", prover.encode(), verifier.encode())


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
