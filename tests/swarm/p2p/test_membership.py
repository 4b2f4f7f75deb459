import ast
from pathlib import Path

import pytest

import nesa_node
from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import PeerId, SessionId
from nesa_node.swarm.p2p.identity import Membership, membership_proof, verify_membership

KEY = "correct horse battery staple"
SESSION = SessionId(bytes(16))
CLIENT, SERVER = PeerId("client"), PeerId("server")


def test_proof_holds_for_its_session_pair_and_direction_only() -> None:
    proof = membership_proof(KEY, SESSION, CLIENT, SERVER)
    assert verify_membership(KEY, proof, SESSION, CLIENT, SERVER)
    assert not verify_membership(KEY, proof, SessionId(b"\1" * 16), CLIENT, SERVER)
    assert not verify_membership(KEY, proof, SESSION, PeerId("other"), SERVER)
    assert not verify_membership(KEY, proof, SESSION, CLIENT, PeerId("other"))
    assert not verify_membership(KEY, proof, SESSION, SERVER, CLIENT)
    assert not verify_membership("another long key", proof, SESSION, CLIENT, SERVER)


def test_empty_proof_is_right_on_the_public_network_only() -> None:
    assert membership_proof(None, SESSION, CLIENT, SERVER) == b""
    assert verify_membership(None, b"", SESSION, CLIENT, SERVER)
    assert not verify_membership(KEY, b"", SESSION, CLIENT, SERVER)
    assert not verify_membership(
        None, membership_proof(KEY, SESSION, CLIENT, SERVER), SESSION, CLIENT, SERVER
    )


def test_parts_of_a_tag_do_not_run_together() -> None:
    membership = Membership(KEY)
    assert membership.tag(b"x", b"ab", b"c") != membership.tag(b"x", b"a", b"bc")
    assert membership.tag(b"x", b"a") != membership.tag(b"y", b"a")
    assert membership.check(membership.tag(b"x", b"a"), b"x", b"a")


def test_dht_keys_of_a_private_swarm_tell_nothing() -> None:
    assert Membership(None).dht_key("nesa/1/nodes") == "nesa/1/nodes"
    private = Membership(KEY).dht_key("nesa/1/nodes")
    assert "nodes" not in private
    assert private != Membership("another long key").dht_key("nesa/1/nodes")


def test_short_key_is_refused_without_repeating_it() -> None:
    with pytest.raises(ConfigError, match="at least 12") as caught:
        Membership("hunter2")
    assert "hunter2" not in str(caught.value)


_SECRET = {"tag", "_tag", "membership_proof", "_hmac", "digest_of", "secret", "proof", "_chosen"}


@pytest.mark.parametrize("layer", ["swarm", "server", "web"])
def test_no_tag_key_or_secret_is_compared_byte_by_byte(layer: str) -> None:
    """`==` ends at the first byte that differs, which the time of a refusal tells."""
    found = []
    for path in (Path(nesa_node.__file__).parent / layer).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq):
                named = {
                    getattr(part, "id", None) or getattr(part, "attr", None)
                    for part in ast.walk(node)
                }
                found += [f"{path.name}:{node.lineno}"] if named & _SECRET else []
    assert not found
