from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import base58
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from nesa_node.core.errors import ConfigError, IdentityError
from nesa_node.core.ids import PeerId
from nesa_node.core.settings.declaration import default_identity_path
from nesa_node.swarm.p2p.identity import (
    Identity,
    base58_decode,
    base58_encode,
    public_key_bytes,
    verify_signature,
)


def test_key_file_is_private_and_keeps_its_peer_id(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "node.key"
    path.parent.mkdir()
    first = Identity.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Identity.load_or_create(path).peer_id == first.peer_id
    assert [entry.name for entry in path.parent.iterdir()] == ["node.key"]


def test_only_the_folder_of_the_default_path_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    misspelt = tmp_path / "misspelt" / "node.key"
    with pytest.raises(ConfigError, match=f"no folder {misspelt.parent}; .*--identity-path"):
        Identity.load_or_create(misspelt)
    assert not misspelt.parent.exists()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    default = default_identity_path()
    Identity.load_or_create(default)
    assert stat.S_IMODE(default.parent.stat().st_mode) == 0o700


def test_a_new_identity_is_told_once_and_an_ephemeral_one_never(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    with capture_logs() as told:
        made = Identity.load_or_create(path)
        Identity.load_or_create(path)
        Identity.ephemeral(tmp_path)
    (event,) = told
    assert event == {
        "event": "identity_made",
        "log_level": "info",
        "path": str(path),
        "peer_id": made.peer_id,
    }


def test_peer_id_is_an_ed25519_id() -> None:
    identifier = "12D3KooWQ7gKkLTjkSCHxdSmEUAhYcKzp4hHz6uWPaXkHKR2b9cF"
    with pytest.raises(ValueError, match="substring not found"):
        public_key_bytes(PeerId("0OIl"))
    assert len(public_key_bytes(PeerId(identifier))) == 32


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "node.key"
    Identity.load_or_create(path)
    path.chmod(mode)
    with pytest.raises(IdentityError, match="chmod 600"):
        Identity.load_or_create(path)


@pytest.mark.parametrize("damage", ["empty", "short", "long", "other public key", "RSA header"])
def test_damaged_key_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "node.key"
    Identity.load_or_create(path)
    content = path.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "short": content[:-1],
            "long": content + b"\0",
            "other public key": content[:-1] + bytes([content[-1] ^ 1]),
            "RSA header": b"\x08\x00" + content[2:],
        }[damage]
    )
    with pytest.raises(IdentityError, match="damaged"):
        Identity.load_or_create(path)


def test_folder_is_no_identity(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="regular file"):
        Identity.load_or_create(tmp_path)


def test_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(IdentityError, match="--identity-path"):
        Identity.load_or_create(tmp_path / "file" / "node.key")


def test_two_that_create_it_at_once_get_the_same_identity(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    with ThreadPoolExecutor(8) as pool:
        identities = list(pool.map(lambda _: Identity.load_or_create(path), range(8)))
    assert len({identity.peer_id for identity in identities}) == 1
    assert os.listdir(tmp_path) == ["node.key"]


def test_private_key_does_not_show(tmp_path: Path) -> None:
    identity = Identity.ephemeral(tmp_path)
    seed = identity.path.read_bytes()[4:36]
    assert seed.hex() not in repr(identity)
    assert repr(seed) not in repr(vars(identity))


def test_signature_holds_for_its_signer_and_data_only(tmp_path: Path) -> None:
    ours, other = Identity.ephemeral(tmp_path), Identity.ephemeral(tmp_path)
    signature = ours.sign(b"data")
    assert verify_signature(ours.peer_id, b"data", signature)
    assert not verify_signature(ours.peer_id, b"date", signature)
    assert not verify_signature(other.peer_id, b"data", signature)
    assert not verify_signature(ours.peer_id, b"data", signature[:-1])
    assert not verify_signature(ours.peer_id, b"data", bytes(64))


@given(st.text(max_size=200), st.binary(max_size=80))
def test_no_text_is_an_id_that_signed_anything(text: str, signature: bytes) -> None:
    assert not verify_signature(PeerId(text), b"data", signature)


@given(st.binary(max_size=60))
def test_base58_is_what_others_mean_by_it(data: bytes) -> None:
    assert base58_encode(data) == base58.b58encode(data).decode()
    assert base58_decode(base58_encode(data)) == data


def test_one_running_node_per_key(tmp_path: Path) -> None:
    identity = Identity.load_or_create(tmp_path / "node.key")
    with (
        identity.lock(),
        pytest.raises(IdentityError, match="in use by another"),
        Identity.load_or_create(tmp_path / "node.key").lock(),
    ):
        pass
    with identity.lock():
        pass
