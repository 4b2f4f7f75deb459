"""A client that trains through a hostile node: it leaves that out, and gets the same adapters."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.client.routing import measurements
from nesa_node.client.training.adapter_folder import WEIGHTS_NAME
from nesa_node.client.training.finetuning_session import FinetuningOptions, FinetuningSession
from nesa_node.core.errors import NesaError
from nesa_node.core.ids import PeerId, Span
from nesa_node.engine.weights.checkpoint import compute_model_id
from nesa_node.engine.weights.hub import open_checkpoint
from nesa_node.swarm.dht.records import NodeStatus
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.reputation import ReputationView
from nesa_node.topology.links.matrix import MeasuredLink, pack_links, peer_digest
from tests.engine.tiny_models import BLOCKS, save_tiny_model
from tests.engine.training.test_adapted_blocks import PEFT_WARNINGS
from tests.hostile.fake_node import serving_member
from tests.hostile.training_relay import MISDEEDS, NO_MISDEED, Misdeed, TrainingRelay
from tests.swarms import in_process_swarm

pytestmark = [*PEFT_WARNINGS, pytest.mark.timeout(120)]
MIDDLE = BLOCKS // 2
STEPS = 3
STEP_TIMEOUT_S = 1.0
WITHIN_S = 60.0
CONFIG: Any = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj"])
FAST = {
    *("NaN output", "exploding output", "another micro-batch", "infinite norm"),
    *("another span's names", "fewer tensors", "computes nothing", "garbage"),
}


def make_batch(step: int) -> dict[str, Tensor]:
    ids_RL = torch.randint(3, 300, (3, 8), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids_RL, "labels": ids_RL}


@dataclass
class Scene:
    model: Path
    addresses: tuple[str, ...]
    peers: list[PeerId]
    relay: TrainingRelay
    expected: dict[str, Tensor]


@contextmanager
def _session(
    model: Path, addresses: tuple[str, ...], allowed: frozenset[PeerId] | None = None
) -> Iterator[FinetuningSession]:
    options = FinetuningOptions(max_tokens=8, learning_rate=1e-2, checkpoint_every=2)
    with AutoDistributedModelForCausalLM.from_pretrained(
        model,
        initial_peers=addresses,
        dtype=torch.float32,
        step_timeout_s=STEP_TIMEOUT_S,
        recovery_timeout_s=20,
    ) as loaded:
        connection: Any = loaded._ensure_connection()
        connection._request = replace(connection._request, allowed_peers=allowed)
        with loaded.finetuning_session(CONFIG, seed=3, options=options) as session:
            yield session


def _train(session: FinetuningSession, target: Path) -> dict[str, Tensor]:
    while session.applied < STEPS:
        session.step(make_batch(session.applied))
    session.save_pretrained(target)
    return load_file(target / WEIGHTS_NAME)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("trainers")
    model = save_tiny_model("llama", folder)
    spans = [Span(0, MIDDLE), Span(MIDDLE, BLOCKS)]
    with in_process_swarm(model, spans, folder, training_gib=0.5) as addresses:
        with _session(model, addresses) as session:
            expected = _train(session, folder / "undisturbed")
        ready = [json.loads((folder / f"ready-{n}.json").read_text()) for n in range(len(spans))]
        peers = [PeerId(one["peer_id"]) for one in ready]
        near = [MeasuredLink(peer_digest(peer), 0.02, 1e9, 0.0) for peer in peers]
        status = NodeStatus(
            state="serving",
            model_id=compute_model_id(open_checkpoint(str(model), cache_dir=folder)),
            model_name="tiny",
            num_blocks=BLOCKS,
            span=(MIDDLE, BLOCKS),
            dtype="float32",
            protocol_version=(1, 6),
            prefill_tokens_per_s=1e7,
            decode_tokens_per_s=1e7,
            free_cache_tokens=10**6,
            total_cache_tokens=10**6,
            context_length=10**6,
            measured=pack_links(near),
        )

        def make(swarm: Swarm) -> TrainingRelay:
            return TrainingRelay(swarm, peers[1], tuple(ready[1]["addresses"]))

        with serving_member(folder, addresses, status, make) as relay:
            yield Scene(model, addresses, peers, relay, expected)


@pytest.fixture(autouse=True)
def _relay_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client has measured no distance, guesses none, and knows no reports."""

    async def ask_none(*_: object) -> None:
        pass

    monkeypatch.setattr(measurements.LatencyView, "_ping_ends", ask_none)
    monkeypatch.setattr(measurements, "fill_links", lambda links, *_: links)
    monkeypatch.setattr(ReputationView, "blames", lambda *_: {})


def _name(misdeed: Misdeed) -> str:
    return misdeed.name.replace(" ", "_")


def _cases() -> list[Any]:
    return [
        pytest.param(each, id=_name(each), marks=() if each.name in FAST else pytest.mark.slow)
        for each in MISDEEDS
    ]


@pytest.mark.parametrize("misdeed", _cases())
def test_session_goes_on_without_the_culprit(
    misdeed: Misdeed, scene: Scene, tmp_path: Path
) -> None:
    relay = scene.relay
    relay.misdeed, relay.opens, relay.misdeeds = misdeed, 0, 0
    started = time.monotonic()
    with _session(scene.model, scene.addresses) as session:
        found = _train(session, tmp_path / "adapter")
        culprit = relay.swarm.identity.peer_id
        selector = session.chain._nodes._selector
        refusals, suspects = selector._refusals, selector.suspected_peers
        assert [hop.peer_id for hop in session.hops] == scene.peers
    assert relay.misdeeds, "the hostile node was never asked"
    if misdeed.code == "lost":
        assert culprit in suspects
    else:
        assert {peer: error.code for peer, error in refusals.items()} == {culprit: misdeed.code}
        assert culprit in str(refusals[culprit])
    assert found.keys() == scene.expected.keys()
    for name, value in found.items():
        assert torch.equal(value, scene.expected[name]), name
    assert time.monotonic() - started < WITHIN_S


def test_pong_between_the_tensors_of_a_state_is_no_misdeed(scene: Scene, tmp_path: Path) -> None:
    relay = scene.relay
    relay.misdeed, relay.opens, relay.misdeeds = NO_MISDEED, 0, 0
    with _session(scene.model, scene.addresses) as session:
        found = _train(session, tmp_path / "adapter")
        assert session.hops[1].peer_id == relay.swarm.identity.peer_id
        assert session.chain.recoveries == 0
    assert relay.misdeeds
    assert all(torch.equal(value, scene.expected[name]) for name, value in found.items())


ALONE = ("NaN output", "silence", "computes nothing", "opens with garbage")


@pytest.mark.parametrize("misdeed", [each for each in MISDEEDS if each.name in ALONE], ids=_name)
def test_without_an_honest_node_the_error_names_the_culprit(
    misdeed: Misdeed, scene: Scene, tmp_path: Path
) -> None:
    relay = scene.relay
    relay.misdeed, relay.opens, relay.misdeeds = misdeed, 0, 0
    culprit = relay.swarm.identity.peer_id
    started = time.monotonic()
    with (
        pytest.raises(NesaError, match=culprit),
        _session(scene.model, scene.addresses, frozenset({scene.peers[0], culprit})) as session,
    ):
        _train(session, tmp_path / "adapter")
    assert relay.misdeeds
    assert time.monotonic() - started < 40
