"""Fine-tuning while nodes and the client die: the adapters of an undisturbed run, bit for bit.

R rows, L tokens of each.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.client.training.adapter_folder import WEIGHTS_NAME
from nesa_node.client.training.finetuning_session import FinetuningOptions, FinetuningSession
from nesa_node.engine.training.adapters import FullConfig
from tests.engine.chained import distance
from tests.engine.tiny_models import BLOCKS
from tests.engine.training.test_adapted_blocks import PEFT_WARNINGS
from tests.swarms import Daemons, daemons, thirds

pytestmark = [*PEFT_WARNINGS, pytest.mark.timeout(240)]
SPANS = thirds(BLOCKS)
CONFIGS: dict[str, Any] = {
    "lora": peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"]
    ),
    "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "full": FullConfig(),
}
KINDS = ["lora", pytest.param("prompt", marks=pytest.mark.slow)]
SEEDS = range(10)
STEPS = 200


def make_batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids_RL = torch.randint(3, 300, (4, 16), generator=generator)
    return {"input_ids": ids_RL, "labels": ids_RL}


@contextmanager
def open_session(
    folder: Path,
    addresses: tuple[str, ...],
    checkpoint: Path | None,
    *,
    kind: str = "lora",
    **more: Any,
) -> Iterator[FinetuningSession]:
    options = FinetuningOptions(
        learning_rate=1e-3, max_tokens=40, checkpoint_every=7, checkpoint_path=checkpoint, **more
    )
    with (
        AutoDistributedModelForCausalLM.from_pretrained(
            folder,
            initial_peers=addresses,
            dtype=torch.float32,
            recovery_timeout_s=30,
            # A client that is killed leaves a temporary identity behind.
            identity_path=None if checkpoint is None else checkpoint.with_suffix(".key"),
        ) as model,
        model.finetuning_session(CONFIGS[kind], seed=3, options=options) as session,
    ):
        yield session


def train(
    folder: Path,
    addresses: tuple[str, ...],
    target: Path,
    *,
    steps: int,
    checkpoint: Path | None,
    kind: str = "lora",
) -> list[int]:
    """Train up to `steps` steps, save the adapter, and return the steps that this run applied."""
    ledger = []
    with open_session(folder, addresses, checkpoint, kind=kind) as session:
        while session.applied < steps:
            ledger.append(session.step(make_batch(session.applied)).step)
        session.save_pretrained(target)
    return ledger


def assert_same_adapter(found: Path, expected: Path) -> None:
    theirs = load_file(expected / WEIGHTS_NAME)
    ours = load_file(found / WEIGHTS_NAME)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


@pytest.fixture(scope="module")
def folder(tiny: Callable[[str], Path]) -> Path:
    return tiny("llama")


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_node_is_replaced_and_changes_no_bit(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    with daemons(folder, tmp_path) as nodes:
        nodes.start_all([*SPANS, *SPANS])
        train(folder, nodes.addresses, tmp_path / "plain", steps=20, checkpoint=None, kind=kind)
        with open_session(folder, nodes.addresses, None, kind=kind) as session:
            ledger = []
            while session.applied < 20:
                if session.applied in (4, 11):
                    kill_one(nodes, session, hop=session.applied % 2 + 1)
                ledger.append(session.step(make_batch(session.applied)).step)
            assert session.chain.recoveries == 2
            session.save_pretrained(tmp_path / "disturbed")
    assert ledger == list(range(1, 21))
    assert_same_adapter(tmp_path / "disturbed", tmp_path / "plain")


def kill_one(nodes: Daemons, session: FinetuningSession, *, hop: int) -> None:
    victim = session.hops[hop].peer_id
    nodes.kill(next(node for node in nodes.nodes if node.peer_id == victim))


@pytest.mark.parametrize("stage", [0, 2])
def test_a_replica_is_lost_and_another_one_joins(stage: int, folder: Path, tmp_path: Path) -> None:
    with daemons(folder, tmp_path) as nodes:
        nodes.start_all([*SPANS, *SPANS])
        train(folder, nodes.addresses, tmp_path / "plain", steps=20, checkpoint=None)
        with open_session(folder, nodes.addresses, None, replicas=2, zero_stage=stage) as session:
            ledger, sizes = [], []
            while session.applied < 20:
                if session.applied == 4:
                    lost = session.hops[3].span
                    kill_one(nodes, session, hop=3)
                elif session.applied == 9:
                    nodes.start(lost)
                ledger.append(session.step(make_batch(session.applied)).step)
                sizes.append(len(session.hops))
            session.save_pretrained(tmp_path / "disturbed")
    assert ledger == list(range(1, 21))
    assert (sizes[0], sizes[5], sizes[-1]) == (6, 5, 6)
    theirs = load_file(tmp_path / "plain" / WEIGHTS_NAME)
    for name, value in load_file(tmp_path / "disturbed" / WEIGHTS_NAME).items():
        assert distance(value, theirs[name]) < 1e-5, name


@pytest.mark.slow
def test_a_node_with_a_part_of_the_weights_is_lost(folder: Path, tmp_path: Path) -> None:
    """In the middle of a step, while the other replica of its span waits for what it has."""
    with daemons(folder, tmp_path) as nodes:
        nodes.start_all([*SPANS, *SPANS])
        train(folder, nodes.addresses, tmp_path / "plain", steps=12, checkpoint=None, kind="full")
        with open_session(
            folder, nodes.addresses, None, kind="full", replicas=2, zero_stage=3
        ) as session:
            ledger = []
            while session.applied < 12:
                if session.applied == 5:
                    threading.Timer(0.05, kill_one, (nodes, session), {"hop": 3}).start()
                ledger.append(session.step(make_batch(session.applied)).step)
            assert session.chain.recoveries >= 1
            session.save_pretrained(tmp_path / "disturbed")
    assert ledger == list(range(1, 13))
    theirs = load_file(tmp_path / "plain" / "model.safetensors")
    for name, value in load_file(tmp_path / "disturbed" / "model.safetensors").items():
        assert distance(value, theirs[name]) < 1e-5, name


@pytest.mark.slow
def test_averaged_replicas_survive_a_loss_and_a_join(folder: Path, tmp_path: Path) -> None:
    """A replica is killed between two averagings, and the rest go on with what they have."""
    with daemons(folder, tmp_path) as nodes:
        nodes.start_all([*SPANS, *SPANS])
        with open_session(folder, nodes.addresses, None, replicas=2, average_every=4) as session:
            ledger, losses, sizes = [], [], []
            while session.applied < 24:
                if session.applied == 6:
                    lost = session.hops[3].span
                    kill_one(nodes, session, hop=3)
                elif session.applied == 9:
                    nodes.start(lost)
                result = session.step(make_batch(session.applied % 4))
                ledger.append(result.step)
                losses.append(result.loss)
                sizes.append(len(session.hops))
    assert ledger == list(range(1, 25))
    assert (sizes[0], sizes[7], sizes[-1]) == (6, 5, 6)
    # The same four batches again and again.
    assert sum(losses[-4:]) < sum(losses[:4])


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_client_continues_from_its_checkpoint(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    with daemons(folder, tmp_path) as nodes:
        nodes.start_all(SPANS)
        train(folder, nodes.addresses, tmp_path / "plain", steps=20, checkpoint=None, kind=kind)
        file = tmp_path / "checkpoint"
        run_client(folder, nodes, file, kind=kind, steps=1000, kill_at=12)
        ledger = train(
            folder, nodes.addresses, tmp_path / "resumed", steps=20, checkpoint=file, kind=kind
        )
    assert 7 < ledger[0] <= 20
    assert ledger == list(range(ledger[0], 21))
    assert_same_adapter(tmp_path / "resumed", tmp_path / "plain")


def run_client(
    folder: Path, nodes: Daemons, file: Path, *, steps: int, kill_at: int, kind: str = "lora"
) -> None:
    """Run a client in a process of its own and kill it in its step `kill_at`."""
    code = (
        "import sys; from pathlib import Path; from tests.faults.test_finetuning import *\n"
        f"folder, file = Path({str(folder)!r}), Path({str(file)!r})\n"
        f"with open_session(folder, {nodes.addresses!r}, file, kind={kind!r}) as s:\n"
        f"    while s.applied < {steps}:\n"
        "        print(s.step(make_batch(s.applied)).step, flush=True)\n"
    )
    client = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    with client:
        for line in client.stdout:
            if int(line) >= kill_at:
                client.kill()
                break


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", SEEDS)
def test_two_hundred_steps_survive_kills_and_joins(
    seed: int, folder: Path, tmp_path: Path, plain_adapter: Path
) -> None:
    """Nodes die and join at random moments; once the client ends in the middle, too."""
    rng = random.Random(seed)
    file = tmp_path / "checkpoint"
    with daemons(folder, tmp_path) as nodes:
        nodes.start_all([*SPANS, *SPANS])
        run_client(folder, nodes, file, steps=1000, kill_at=rng.randint(10, 60))
        blows = sorted(rng.sample(range(70, 190), 2))
        ledger = []
        with open_session(folder, nodes.addresses, file) as session:
            while session.applied < STEPS:
                if session.applied in blows:
                    blows.remove(session.applied)
                    strike = threading.Timer(
                        rng.uniform(0, 0.1), kill_one, (nodes, session), {"hop": rng.randint(0, 2)}
                    )
                    strike.start()
                ledger.append(session.step(make_batch(session.applied)).step)
                if len(blows) == 1 and session.applied == blows[0] - 5:
                    nodes.start_all(SPANS)  # the dead one's blocks have two holders again
            session.save_pretrained(tmp_path / "disturbed")
    assert ledger == list(range(ledger[0], STEPS + 1))
    assert_same_adapter(tmp_path / "disturbed", plain_adapter)


@pytest.fixture(scope="module")
def plain_adapter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 200 undisturbed steps."""
    target = tmp_path_factory.mktemp("plain")
    with daemons(folder, target) as nodes:
        nodes.start_all(SPANS)
        train(folder, nodes.addresses, target / "adapter", steps=STEPS, checkpoint=None)
    return target / "adapter"
