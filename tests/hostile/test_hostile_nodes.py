"""A client whose route leads through a hostile member: it finds another way to the same tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet

from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.client.routing import measurements as surroundings
from nesa_node.core.ids import PeerId, Span
from nesa_node.core.settings.choices import RouteName
from nesa_node.engine.weights.checkpoint import compute_model_id
from nesa_node.engine.weights.hub import open_checkpoint
from nesa_node.swarm.dht.records import NodeStatus
from nesa_node.swarm.reputation import ReputationView
from nesa_node.topology.links.matrix import MeasuredLink, pack_links, peer_digest
from tests.client.local_models import left_padded
from tests.engine.tiny_models import BLOCKS, HIDDEN, reference, save_tiny_model
from tests.hostile.fake_node import AS_FIRST, AS_LAST, Behaviour, FakeNode, fake_node
from tests.same_tokens import ReferenceRun, assert_same_as, run_reference
from tests.swarms import in_process_swarm

MIDDLE = BLOCKS // 2
NEW_TOKENS = 12
OPTIONS: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
GROWTH = 48 << 20
"""Of the process's peak, which the fake shares; a flood is 256 MiB."""


@dataclass
class Scene:
    model: Path
    addresses: tuple[str, ...]
    peers: tuple[PeerId, ...]
    run: ReferenceRun


@pytest.fixture(autouse=True)
def _nobody_is_better_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the client might not choose the fake.

    It has measured no distance, guesses none, and has not heard what others went through.
    """

    async def ask_nobody(*_: object) -> None:
        pass

    monkeypatch.setattr(surroundings.LatencyView, "_ping_ends", ask_nobody)
    monkeypatch.setattr(surroundings, "fill_links", lambda links, *_: links)
    monkeypatch.setattr(ReputationView, "blames", lambda *_: {})


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("hostile")
    model = save_tiny_model("llama", folder)
    run = run_reference(reference(model), *left_padded([12]), **OPTIONS)
    spans = [Span(0, MIDDLE), Span(MIDDLE, BLOCKS)]
    with in_process_swarm(model, spans, folder) as addresses:
        ready = [json.loads((folder / f"ready-{n}.json").read_text()) for n in range(len(spans))]
        yield Scene(model, addresses, tuple(PeerId(one["peer_id"]) for one in ready), run)


@contextmanager
def _fake(scene: Scene, folder: Path, span: tuple[int, int]) -> Iterator[FakeNode]:
    # What it says of its links is as good as what it says of its speed.
    near = [MeasuredLink(peer_digest(peer), 0.02, 1e9, 0.0) for peer in scene.peers]
    status = NodeStatus(
        state="serving",
        model_id=compute_model_id(open_checkpoint(str(scene.model), cache_dir=folder)),
        model_name="tiny",
        num_blocks=BLOCKS,
        span=span,
        dtype="float32",
        protocol_version=(1, 0),
        prefill_tokens_per_s=1e7,
        decode_tokens_per_s=1e7,
        free_cache_tokens=10**6,
        total_cache_tokens=10**6,
        context_length=10**6,
        measured=pack_links(near),
    )
    with fake_node(folder, scene.addresses, status, HIDDEN) as fake:
        yield fake


@pytest.fixture
def fake(request: pytest.FixtureRequest, scene: Scene, tmp_path: Path) -> Iterator[FakeNode]:
    # A new identity for each test: a client avoids one that has prevented a few audits.
    span = {"first": (0, MIDDLE), "last": (MIDDLE, BLOCKS)}[request.param]
    with _fake(scene, tmp_path, span) as node:
        yield node


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(
        int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")
    )


def _generate_past(
    scene: Scene, fake: FakeNode, behaviour: Behaviour, route: RouteName, within_s: float
) -> None:
    fake.behaviour, fake.opens, fake.misdeeds = behaviour, 0, 0
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _peak_bytes()
    ids_BL, mask_BL = left_padded([12])
    with AutoDistributedModelForCausalLM.from_pretrained(
        scene.model,
        initial_peers=scene.addresses,
        routing=route,
        dtype=torch.float32,
        step_timeout_s=0.7,
        recovery_timeout_s=30,
    ) as model:
        started = time.monotonic()
        with model.inference_session(max_length=64) as session:
            ours_BL = model.generate(ids_BL, attention_mask=mask_BL, session=session, **OPTIONS)
            used = {hop.peer_id for hop in session.hops}
        took_s = time.monotonic() - started
    assert_same_as(scene.run, ours_BL)
    assert fake.opens, "the hostile node was never asked"
    assert fake.swarm.identity.peer_id not in used
    assert took_s < within_s
    assert _peak_bytes() - before < GROWTH


def _cases(behaviours: Sequence[Behaviour], fast: Collection[str]) -> list[ParameterSet]:
    """All of them; those that are not `fast` as slow tests."""
    return [
        pytest.param(
            behaviour,
            id=behaviour.name,
            marks=() if behaviour.name in fast else pytest.mark.slow,
        )
        for behaviour in behaviours
    ]


FAST_IN_A_CHAIN = {"garbage", "gibibyte", "not finite", "other steps", "hang up", "silence"}


@pytest.mark.parametrize("fake", ["last"], indirect=True)
@pytest.mark.parametrize("behaviour", _cases(AS_LAST, FAST_IN_A_CHAIN))
def test_node_that_misbehaves_at_the_end_of_a_chain_is_replaced(
    scene: Scene, fake: FakeNode, behaviour: Behaviour
) -> None:
    _generate_past(scene, fake, behaviour, "chain", within_s=20)


@pytest.mark.parametrize("fake", ["last"], indirect=True)
@pytest.mark.parametrize("behaviour", _cases(AS_LAST, {"refuse bad_tensor", "flood of outputs"}))
def test_last_node_of_a_star_that_misbehaves_is_replaced(
    scene: Scene, fake: FakeNode, behaviour: Behaviour
) -> None:
    _generate_past(scene, fake, behaviour, "star", within_s=20)


@pytest.mark.parametrize("fake", ["first"], indirect=True)
@pytest.mark.parametrize(
    "behaviour", _cases([*AS_FIRST, *AS_LAST[-5:]], {"push not finite", "blame at link"})
)
def test_node_that_misbehaves_before_others_is_replaced(
    scene: Scene, fake: FakeNode, behaviour: Behaviour
) -> None:
    _generate_past(scene, fake, behaviour, "chain", within_s=20)


@pytest.mark.parametrize("fake", ["first"], indirect=True)
@pytest.mark.parametrize("behaviour", _cases(AS_LAST[::3], {"wrong shape"}))
def test_first_node_of_a_star_that_misbehaves_is_replaced(
    scene: Scene, fake: FakeNode, behaviour: Behaviour
) -> None:
    _generate_past(scene, fake, behaviour, "star", within_s=20)
