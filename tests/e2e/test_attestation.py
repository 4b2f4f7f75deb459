"""Nodes whose hardware signs, here a program by a test's own root, and a client that demands it."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from nesa_node.client.verification import attestor
from nesa_node.core.errors import ConfigError, RefusedError
from nesa_node.core.ids import Span
from nesa_node.engine.weights.checkpoint import LocalCheckpoint
from nesa_node.server.node import served_span
from tests.client.local_models import random_ids
from tests.e2e.joining import joined
from tests.engine.tiny_models import BLOCKS, reference
from tests.nodes_seen import NodesSeen
from tests.same_tokens import assert_same_tokens
from tests.swarms import in_process_swarm, thirds
from tests.verification.attestation.made_quotes import MEASUREMENT, snp_root

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def llama(tiny: Callable[[str], Path]) -> Path:
    return tiny("llama")


@pytest.fixture
def attesting(tmp_path: Path) -> dict[str, Any]:
    """Settings of nodes that attest."""
    folder = tmp_path / "root"
    folder.mkdir()
    snp_root().save(folder)
    program = ("-m", "tests.verification.attestation.quote_program", str(folder))
    return {
        "attestation": "command",
        "attestation_command": shlex.join((sys.executable, *program)),
    }


def write_policy(folder: Path, measurement: bytes = MEASUREMENT, **changes: Any) -> Path:
    rule = {"measurements": {"measurement": [measurement.hex()]}, "roots": snp_root().pem}
    path = folder / "policy.json"
    path.write_text(json.dumps({"accept": [{"snp": rule}], **changes}))
    return path


def refused(llama: Path, addresses: Sequence[str], policy: Path) -> RefusedError:
    """The error of a client that opens a session."""
    with (
        pytest.raises(RefusedError) as caught,
        joined(llama, addresses, "chain", require_attestation=policy),
    ):
        pass
    assert caught.value.code == "unattested"
    return caught.value


def test_attested_nodes_serve(llama: Path, tmp_path: Path, attesting: dict[str, Any]) -> None:
    prompt = random_ids(1, 12)
    with (
        in_process_swarm(llama, thirds(BLOCKS), tmp_path, **attesting) as addresses,
        joined(llama, addresses, "chain", require_attestation=write_policy(tmp_path)) as model,
    ):
        tokens = model.generate(prompt, **OPTIONS)
    assert_same_tokens(reference(llama), tokens, prompt, **OPTIONS)


def test_node_without_attestation_is_passed_over(
    llama: Path, tmp_path: Path, attesting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It serves the blocks of all three attested ones, so that one hop would do."""
    seen = NodesSeen(monkeypatch)
    plain = tmp_path / "plain"
    plain.mkdir()
    with (
        in_process_swarm(llama, thirds(BLOCKS), tmp_path, **attesting) as addresses,
        in_process_swarm(llama, [Span(0, BLOCKS)], plain, initial_peers=addresses),
    ):
        with (
            joined(llama, addresses, "chain", require_attestation=write_policy(tmp_path)) as model,
            model.inference_session(max_length=8),
        ):
            assert seen.sessions == [1, 1, 1, 0]
        seen.wait_until_free(10.0)
        with joined(llama, addresses, "chain") as model, model.inference_session(max_length=8):
            assert seen.sessions == [0, 0, 0, 1]


def test_other_software_is_refused_by_name(
    llama: Path, tmp_path: Path, attesting: dict[str, Any]
) -> None:
    policy = write_policy(tmp_path, measurement=bytes(48))
    with in_process_swarm(llama, [Span(0, BLOCKS)], tmp_path, **attesting) as addresses:
        assert "measurement 'measurement' is 6465" in str(refused(llama, addresses, policy))


def test_node_that_does_not_attest_says_so(llama: Path, tmp_path: Path) -> None:
    with in_process_swarm(llama, [Span(0, BLOCKS)], tmp_path) as addresses:
        error = refused(llama, addresses, write_policy(tmp_path))
    assert "runs without --attestation" in str(error)


def test_failing_program_is_reported(llama: Path, tmp_path: Path) -> None:
    failing = {"attestation": "command", "attestation_command": "false"}
    with in_process_swarm(llama, [Span(0, BLOCKS)], tmp_path, **failing) as addresses:
        error = refused(llama, addresses, write_policy(tmp_path))
    assert "false failed with exit code 1" in str(error)


def test_other_weights_are_refused(
    llama: Path, tmp_path: Path, attesting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_span, "hash_span", lambda *_: b"x" * 32)
    with in_process_swarm(llama, [Span(0, BLOCKS)], tmp_path, **attesting) as addresses:
        error = refused(llama, addresses, write_policy(tmp_path))
    assert "are not this model's" in str(error)


def test_weights_that_the_client_lacks_are_trusted_only_by_the_policy(
    llama: Path, tmp_path: Path, attesting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attestor, "hash_span", fail)
    with in_process_swarm(llama, [Span(0, BLOCKS)], tmp_path, **attesting) as addresses:
        monkeypatch.setattr(LocalCheckpoint, "download_sizes", lambda *_: {"a part": 1})
        error = refused(llama, addresses, write_policy(tmp_path))
        assert "does not have the weights" in str(error)
        policy = write_policy(tmp_path, unknown_weights=True)
        with joined(llama, addresses, "chain", require_attestation=policy):
            pass


def fail(*_: object) -> bytes:
    raise AssertionError("the client hashed weights that it does not have")


def test_wrong_policy_fails_at_once(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_text("{}")
    with (
        pytest.raises(ConfigError, match=r"policy\.json is wrong at accept"),
        joined(llama, ("127.0.0.1:1",), "chain", require_attestation=path),
    ):
        pass
