"""A node that trains under attack by a client: it refuses by name, serves on, and keeps nothing."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nesa_node.core.ids import PeerId, Span
from nesa_node.engine.weights.checkpoint import compute_model_id
from nesa_node.engine.weights.hub import open_checkpoint
from nesa_node.server.training.training_memory import TrainingMemory
from nesa_node.server.training.training_session import TrainingSession
from nesa_node.swarm.node import open_swarm
from nesa_node.swarm.p2p.identity import Identity
from tests.engine.tiny_models import BLOCKS, HEAD_DIM, HIDDEN, save_tiny_model
from tests.engine.training.test_adapted_blocks import PEFT_WARNINGS
from tests.hostile import training_attacks
from tests.hostile.attacker import Attacker, Tally
from tests.hostile.bystander import Bystander, bystander
from tests.hostile.frames import Facts
from tests.swarms import in_process_swarm

pytestmark = [*PEFT_WARNINGS, pytest.mark.timeout(180)]
FREE_WITHIN_S = 45.0
"""A client that reads nothing is given up after 30 s."""


class Scene:
    """One node in this process, and an honest client that generates beside the attacks."""

    def __init__(
        self, model: Path, folder: Path, addresses: tuple[str, ...], honest: Bystander
    ) -> None:
        self.addresses = addresses
        self.honest = honest
        ready = json.loads((folder / "ready-0.json").read_text())
        model_id = compute_model_id(open_checkpoint(str(model), cache_dir=folder))
        self.facts = Facts(
            ready["peer_id"], addresses, model_id, (0, BLOCKS), HIDDEN, (2, HEAD_DIM)
        )
        [self.memory] = [each for each in gc.get_objects() if type(each) is TrainingMemory]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("training")
    model = save_tiny_model("llama", folder)
    with (
        in_process_swarm(model, [Span(0, BLOCKS)], folder, training_gib=0.5) as addresses,
        bystander(model, addresses) as honest,
    ):
        yield Scene(model, folder, addresses, honest)


Attack = Callable[[Attacker], Coroutine[Any, Any, None]]
ATTACKS: tuple[Attack, ...] = (
    training_attacks.bad_opens,
    training_attacks.bad_plans,
    training_attacks.bad_passes,
    training_attacks.exploding,
    training_attacks.fatal_messages,
    training_attacks.bad_states,
    training_attacks.floods,
    training_attacks.unread,
    training_attacks.vanish,
    training_attacks.open_and_close,
)


async def test_reading_stops_while_tensors_fill_the_promise(scene: Scene, tmp_path: Path) -> None:
    """The node computes nothing, since a state's answers are not read."""
    async with open_swarm(
        Identity.ephemeral(tmp_path), initial_peers=scene.addresses, listen=False
    ) as swarm:
        await swarm.transport.connect(PeerId(scene.facts.peer_id), scene.addresses)
        attacker = Attacker(swarm, scene.facts, random.Random(0), Tally())
        async with training_attacks.training(attacker) as hostile:
            training_attacks.send_much(hostile)
            [session] = [each for each in gc.get_objects() if type(each) is TrainingSession]
            deadline = time.monotonic() + 10
            while session._waiting_bytes < 0.8 * session._max_waiting_bytes:
                assert time.monotonic() < deadline, "the node reads on"
                await asyncio.sleep(0.1)
            await asyncio.sleep(2)
            assert session._waiting_bytes <= session._max_waiting_bytes
            del session
        await _memory_is_free(scene)


async def _memory_is_free(scene: Scene) -> None:
    deadline = time.monotonic() + FREE_WITHIN_S
    while scene.memory.free_bytes != scene.memory.total_bytes:
        assert time.monotonic() < deadline, "memory is promised to a session that has ended"
        await asyncio.sleep(0.1)


@contextmanager
def _honest_tokens_go_on(scene: Scene) -> Iterator[None]:
    yield
    before, deadline = scene.honest.tokens, time.monotonic() + 30
    while scene.honest.tokens <= before:
        assert scene.honest.error is None, scene.honest.error
        assert time.monotonic() < deadline, "an honest session got no tokens"
        time.sleep(0.1)


SLOW = (training_attacks.unread, training_attacks.floods)


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(each, id=each.__name__, marks=[pytest.mark.slow] if each in SLOW else [])
        for each in ATTACKS
    ],
)
async def test_node_refuses_by_name_and_serves_on(
    attack: Attack, scene: Scene, tmp_path: Path
) -> None:
    tally = Tally()
    with _honest_tokens_go_on(scene):
        async with (
            open_swarm(
                Identity.ephemeral(tmp_path), initial_peers=scene.addresses, listen=False
            ) as swarm,
            open_swarm(
                Identity.ephemeral(tmp_path), initial_peers=scene.addresses, listen=False
            ) as other,
        ):
            for each in (swarm, other):
                await each.transport.connect(PeerId(scene.facts.peer_id), scene.addresses)
            await attack(Attacker(swarm, scene.facts, random.Random(0), tally))
            print(tally.summary())
            honest = Attacker(other, scene.facts, random.Random(1), Tally())
            async with training_attacks.training(honest) as session:
                await session.one_step()
                await session.one_step()
    assert not tally.failures()
    await _memory_is_free(scene)
