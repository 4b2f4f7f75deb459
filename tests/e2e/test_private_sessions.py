"""Sessions whose nodes multiply encrypted vectors: same tokens, and nothing to read."""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from threading import Event, Thread, Timer
from typing import Any

import numpy as np
import pytest
import torch

from nesa_node.client.model import auto
from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.client.model.loop_thread import Interrupt
from nesa_node.client.private import private_nodes
from nesa_node.client.private.private_link import SessionKeys, open_private_link
from nesa_node.client.private.remote_linear import TOKENS_AT_ONCE
from nesa_node.client.routing.request import ConnectionOptions
from nesa_node.client.session.connection import join_as_client
from nesa_node.client.verification.audit_history import AuditHistory
from nesa_node.core.errors import (
    BusyError,
    ConfigError,
    MissingBlocksError,
    ProtocolError,
    RemoteError,
    UnsupportedFeatureError,
)
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.core.wait_tracking import WaitTracker
from nesa_node.engine.weights.checkpoint import compute_model_id
from nesa_node.engine.weights.hub import open_checkpoint
from nesa_node.privacy.layout import plan_layout
from nesa_node.privacy.native_ring import make_ring
from nesa_node.privacy.parameters import RingParameters
from nesa_node.privacy.ring import Ring
from nesa_node.server.private.encoded_blocks import EncodedBlocks
from nesa_node.server.private.private_server import PrivateServer
from nesa_node.swarm.protocol.private_messages import EncryptedInput, RotationKey
from tests.cli.tiny import BLOCKS as TINY_BLOCKS
from tests.cli.tiny import write_tiny_model
from tests.client.local_models import random_ids
from tests.engine.tiny_models import BLOCKS, reference
from tests.first_is_fast import first_is_fast
from tests.same_tokens import assert_same_tokens
from tests.swarms import Daemons, daemons, in_process_swarm

OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
HALVES = [Span(0, 3), Span(3, BLOCKS)]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def llama(tiny: Callable[[str], Path]) -> Path:
    return tiny("llama")


@pytest.fixture(scope="module")
def addresses(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    folder = tmp_path_factory.mktemp("swarm")
    with in_process_swarm(llama, HALVES, folder, private="ckks") as joining:
        yield joining


def private_model(
    folder: Path, addresses: Sequence[str], **options: Any
) -> DistributedModelForCausalLM:
    return AutoDistributedModelForCausalLM.from_pretrained(
        folder,
        initial_peers=addresses,
        **{"dtype": torch.float32, "private": "ckks", **options},
    )


@pytest.mark.parametrize("family", first_is_fast("qwen3", "gpt2", "bloom"))
def test_tokens_of_other_families_are_those_of_transformers(
    family: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """Matrices that are stored transposed, biases, and layers that hold three in one."""
    folder = tiny(family)
    with (
        in_process_swarm(folder, HALVES, tmp_path, private="ckks") as joining,
        private_model(folder, joining) as model,
    ):
        prompt = random_ids(1, 7)
        assert_same_tokens(reference(folder), model.generate(prompt, **OPTIONS), prompt, **OPTIONS)


def test_tokens_and_logits_are_those_of_transformers(
    llama: Path, addresses: tuple[str, ...]
) -> None:
    """Of several rows, with beams, and in a session that is rolled back."""
    prompt = random_ids(2, TOKENS_AT_ONCE // 2 + 4)
    with private_model(llama, addresses) as model:
        for options in (OPTIONS, OPTIONS | {"num_beams": 2, "max_new_tokens": 4}):
            tokens = model.generate(prompt, **options)
            assert_same_tokens(reference(llama), tokens, prompt, **options)
        with model.inference_session(max_length=60, batch_size=2) as session:
            assert [hop.span for hop in session.hops] == HALVES
            logits = session.step(prompt)
            expected = reference(llama)(prompt).logits
            assert (logits - expected).abs().max() <= 1e-3 * expected.abs().max()
            session.rollback([4, 4])
            again = session.step(prompt[:, 4:])
            assert (again - expected[:, 4:]).abs().max() <= 1e-3 * expected.abs().max()


def test_tokens_are_the_same_where_weights_are_mapped_from_a_file(
    llama: Path, tmp_path: Path
) -> None:
    limits = {"private": "ckks", "private_cache_gib": 2**-20}
    with (
        in_process_swarm(llama, HALVES, tmp_path, **limits) as joining,
        private_model(llama, joining) as model,
    ):
        prompt = random_ids(1, 5)
        assert_same_tokens(reference(llama), model.generate(prompt, **OPTIONS), prompt, **OPTIONS)


def test_a_step_tells_how_far_it_is(llama: Path, addresses: tuple[str, ...]) -> None:
    waits, told = WaitTracker(), []
    over = Event()

    def look() -> None:
        while not over.wait(0.02):
            if (wait := waits.slow_wait(after_s=0.5)) is not None:
                told.append(wait.progress)

    looking = Thread(target=look)
    with (
        private_model(llama, addresses) as model,
        waits.activate(),
        model.inference_session(max_length=40) as session,
    ):
        looking.start()
        session.step(random_ids(1, 40))
        over.set()
        looking.join()
    seen = [re.fullmatch(r"block (\d) of 6, (\S+) MiB, about \d+ s left", each) for each in told]
    blocks, mib = zip(*(each.groups() for each in seen if each is not None), strict=True)
    assert sorted(blocks) == list(blocks)
    assert {"2", "4", "6"} <= {*blocks}
    assert sorted(map(float, mib)) == list(map(float, mib))
    # 40 tokens' ciphertexts of four products a block: 40 KB in and 53 KB out at least.
    assert float(mib[-1]) > 40 * 6 * 4 * 93e3 / 2**20 * 0.8


def test_another_node_takes_the_place_of_one_that_dies(llama: Path, tmp_path: Path) -> None:
    prompt = random_ids(1, 6)
    with daemons(llama, tmp_path, "--private", "ckks") as swarm:
        swarm.start_all([HALVES[0], HALVES[1], HALVES[1]])
        with private_model(llama, swarm.addresses) as model:
            killed: list[str] = []

            def kill_once(*_: object) -> bool:
                used = {hop.peer_id for hop in session.hops}
                victim = next(node for node in swarm.nodes[1:] if node.peer_id in used)
                if not killed:
                    swarm.kill(victim)
                    killed.append(victim.peer_id)
                return False

            with model.inference_session(max_length=40) as session:
                tokens = model.generate(
                    prompt, session=session, stopping_criteria=[kill_once], **OPTIONS
                )
                assert killed
                assert killed[0] not in {hop.peer_id for hop in session.hops}
        assert_same_tokens(reference(llama), tokens, prompt, **OPTIONS)


def require_same_tokens_after_kills(swarm: Daemons, model: Any, expected: Any) -> None:
    """Ten times a node of the second half is killed, at a moment that a seeded generator chooses.

    `expected` is the model alone.
    """
    rng, prompt = random.Random(26), random_ids(1, 6)
    started = time.monotonic()
    model.generate(prompt, **OPTIONS)
    usual_s = time.monotonic() - started
    for _ in range(10):
        with model.inference_session(max_length=40) as session:
            used = {hop.peer_id for hop in session.hops}
            victim = next(
                node for node in swarm.nodes if node.peer_id in used and node.span == HALVES[1]
            )
            killing = Timer(rng.uniform(0, usual_s), swarm.kill, [victim])
            killing.start()
            tokens = model.generate(prompt, session=session, **OPTIONS)
            killing.join()
        assert_same_tokens(expected, tokens, prompt, **OPTIONS)
        swarm.start_all([HALVES[1]])


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_nodes_that_are_killed_at_any_moment_change_no_token(llama: Path, tmp_path: Path) -> None:
    with daemons(llama, tmp_path, "--private", "ckks") as swarm:
        swarm.start_all([HALVES[0], HALVES[1], HALVES[1]])
        with private_model(llama, swarm.addresses) as model:
            require_same_tokens_after_kills(swarm, model, reference(llama))


def test_a_swarm_without_private_nodes_is_told_so(llama: Path, tmp_path: Path) -> None:
    with (
        in_process_swarm(llama, [Span(0, BLOCKS)], tmp_path) as joining,
        private_model(llama, joining, recovery_timeout_s=1) as model,
        pytest.raises(MissingBlocksError, match=r"with block 0 .*nesa-node run --private ckks"),
    ):
        model.generate(random_ids(1, 4), **OPTIONS)


@pytest.mark.slow
def test_only_nodes_that_announce_private_sessions_are_asked(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain node with all blocks, which would be asked first, is not."""
    asked: list[PeerId] = []
    open_link = open_private_link

    def note(swarm: Any, model_id: Any, peer: PeerId, *arguments: Any) -> Any:
        asked.append(peer)
        return open_link(swarm, model_id, peer, *arguments)

    monkeypatch.setattr(private_nodes, "open_private_link", note)
    with daemons(llama, tmp_path) as swarm:
        swarm.start(Span(0, BLOCKS))
        private = swarm.start_all(HALVES, "--private", "ckks")
        with private_model(llama, swarm.addresses) as model:
            model.generate(random_ids(1, 4), **OPTIONS)
    assert set(asked) == {node.peer_id for node in private}


def test_what_private_sessions_cannot_do_is_refused(
    llama: Path, addresses: tuple[str, ...], tiny: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        private_model(llama, addresses, verify="2of3")
    with (
        private_model(llama, addresses, adapter="a" * 64) as model,
        pytest.raises(UnsupportedFeatureError, match="no adapters"),
    ):
        model.generate(random_ids(1, 4), **OPTIONS)


def test_experts_are_refused(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Which of them are asked would tell the text."""
    folder = tiny("mixtral")
    with (
        in_process_swarm(folder, [Span(0, BLOCKS)], tmp_path, private="ckks") as joining,
        private_model(folder, joining) as model,
        pytest.raises(UnsupportedFeatureError, match=r"linear layers, and .* is none"),
    ):
        model.generate(random_ids(1, 4), **OPTIONS)


class Wire:
    """A private stream on which anything can be sent."""

    def __init__(self, llama: Path, addresses: tuple[str, ...]) -> None:
        self.ring = make_ring(RingParameters())
        self.keys = SessionKeys(self.ring)
        self._checkpoint = open_checkpoint(str(llama), cache_dir=llama)
        self.model_id = compute_model_id(self._checkpoint)
        self._addresses = addresses

    def exchange(
        self, send: Callable[[Any], Any], *, model_id: ModelId | None = None, block: int = 0
    ) -> None:
        """Open a link to the first node; `send` gets it."""

        async def run() -> None:
            options = ConnectionOptions(initial_peers=self._addresses)
            async with join_as_client(options) as swarm:
                peer = PeerId(self._addresses[0].rpartition("/")[2])
                async with open_private_link(
                    swarm,
                    model_id or self.model_id,
                    peer,
                    self._addresses,
                    "ckks",
                    self.keys,
                    block,
                ) as link:
                    await send(link)

        while True:
            try:
                return asyncio.run(run())
            except BusyError:  # it encodes its weights
                time.sleep(0.5)


PATH = "model.layers.0.mlp.down_proj"


def encrypted_input(wire: Wire, **changes: Any) -> tuple[EncryptedInput, bytes]:
    payload = bytes(wire.ring.degree // 8 * 78)
    fields: dict[str, Any] = {
        "request": 0,
        "path": PATH,
        "seeds": (bytes(32),),
        "nbytes": len(payload),
    }
    return EncryptedInput(**(fields | changes)), payload


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"path": "model.layers.5.mlp.down_proj"}, "bad_product"),
        ({"path": "lm_head"}, "bad_product"),
        ({"seeds": (bytes(32),) * 2}, "bad_residues"),
    ],
)
def test_a_bad_request_is_answered_with_its_reason(
    llama: Path, addresses: tuple[str, ...], change: dict[str, Any], code: str
) -> None:
    wire = Wire(llama, addresses)
    message, payload = encrypted_input(wire, **change)

    async def send(link: Any) -> None:
        await link._stream.send(message, payload)
        answer, _ = await link._stream.receive()
        assert (answer.code, bool(answer.message)) == (code, True)

    wire.exchange(send)


def test_residues_above_their_prime_are_refused(llama: Path, addresses: tuple[str, ...]) -> None:
    wire = Wire(llama, addresses)
    message, payload = encrypted_input(wire)

    async def send(link: Any) -> None:
        await link._stream.send(message, b"\xff" * len(payload))
        answer, _ = await link._stream.receive()
        assert answer.code == "bad_residues"

    wire.exchange(send)


def test_other_messages_and_models_are_refused(llama: Path, addresses: tuple[str, ...]) -> None:
    wire = Wire(llama, addresses)

    async def send(link: Any) -> None:
        await link._stream.send(RotationKey(steps=1, nbytes=0))
        answer, _ = await link._stream.receive()
        assert answer.code == "unexpected"

    wire.exchange(send)
    with pytest.raises(RemoteError, match="this node serves"):
        wire.exchange(send, model_id=ModelId("other@0000000000000000"))


def test_a_node_with_other_blocks_by_now_is_given_no_keys(
    llama: Path, addresses: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = Wire(llama, addresses)
    monkeypatch.setattr(SessionKeys, "packed", lambda *_: pytest.fail("keys were made"))
    with pytest.raises(ProtocolError, match="multiplies with blocks"):
        wire.exchange(lambda _: None, block=4)


def test_a_node_that_breaks_the_protocol_is_passed_over(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It claims all blocks, so that it is asked first."""
    serve = PrivateServer._serve

    async def serve_wrongly(server: PrivateServer, stream: Any, opened: Any) -> None:
        if server._blocks is not None and len(server._blocks.span) == BLOCKS:
            await stream.send(RotationKey(steps=1, nbytes=0))
        else:
            await serve(server, stream, opened)

    monkeypatch.setattr(PrivateServer, "_serve", serve_wrongly)
    prompt = random_ids(1, 5)
    spans = [Span(0, BLOCKS), *HALVES]
    with (
        in_process_swarm(llama, spans, tmp_path, private="ckks") as joining,
        private_model(llama, joining) as model,
    ):
        tokens = model.generate(prompt, **OPTIONS)
        assert_same_tokens(reference(llama), tokens, prompt, **OPTIONS)


def test_an_interrupted_session_opens_no_stream_again(
    llama: Path, addresses: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = 0
    open_link = open_private_link

    def count(*arguments: Any) -> Any:
        nonlocal opened
        opened += 1
        return open_link(*arguments)

    monkeypatch.setattr(private_nodes, "open_private_link", count)
    interrupt = Interrupt()
    with private_model(llama, addresses) as model:
        Timer(1.0, interrupt.set).start()
        with (
            pytest.raises(CancelledError),
            model.inference_session(max_length=400, interrupt=interrupt) as session,
        ):
            session.step(random_ids(1, 390))
        before = opened
        time.sleep(3)
        assert before == opened == len(HALVES)


def test_an_answer_that_is_no_product_is_an_error_without_another_node(
    llama: Path, addresses: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Residues that no node can have made."""
    monkeypatch.setattr(
        "nesa_node.server.private.encoded_blocks.pack_residues",
        lambda ring, residues: (
            b"\xff" * (residues.size // ring.degree // 2 * ring.degree // 8 * 52)
        ),
    )
    with (
        private_model(llama, addresses, recovery_timeout_s=1) as model,
        pytest.raises(MissingBlocksError, match="not below its prime"),
    ):
        model.generate(random_ids(1, 4), **OPTIONS)


def test_a_node_with_wrong_products_is_left_for_good(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a hundredth. It claims all blocks, so that it is asked first."""
    find_scale = EncodedBlocks.scale

    def lie(blocks: EncodedBlocks, path: str) -> float:
        factor = 1.01 if len(blocks.span) == BLOCKS and "down_proj" in path else 1.0
        return find_scale(blocks, path) * factor

    monkeypatch.setattr(EncodedBlocks, "scale", lie)
    audits_path = tmp_path / "audits.db"
    monkeypatch.setattr(auto, "default_audits_path", lambda: audits_path)
    keys: list[SessionKeys] = []

    def make_keys(ring: Ring) -> SessionKeys:
        keys.append(SessionKeys(ring))
        return keys[-1]

    monkeypatch.setattr(private_nodes, "SessionKeys", make_keys)
    prompt = random_ids(1, 5)
    spans = [Span(0, BLOCKS), *HALVES]
    with in_process_swarm(llama, spans, tmp_path, private="ckks") as joining:
        for expected_keys in (2, 3):
            with private_model(llama, joining) as model:
                with model.inference_session(max_length=40) as session:
                    before = [hop.span for hop in session.hops]
                    tokens = model.generate(prompt, session=session, **OPTIONS)
                    after = [hop.span for hop in session.hops]
                assert_same_tokens(reference(llama), tokens, prompt, **OPTIONS)
            assert after == HALVES
            assert len(keys) == expected_keys
        assert before == HALVES  # of the second session
    (reason,) = AuditHistory(audits_path).barred.values()
    assert reason == "its product at model.layers.0.mlp.down_proj was wrong"


def test_links_multiply_as_numpy_does(llama: Path, addresses: tuple[str, ...]) -> None:
    wire = Wire(llama, addresses)
    weight = reference(llama).get_parameter(f"{PATH}.weight").detach().double().numpy()
    layout = plan_layout(weight.shape[0], weight.shape[1], wire.ring.parameters.slots)
    x = np.random.default_rng(0).uniform(-1, 1, weight.shape[1])

    async def send(link: Any) -> None:
        tokens = [[wire.keys.secret.encrypt(slots) for slots in layout.pack(x)]] * 2
        for blocks, scale in await link.multiply(PATH, layout, tokens):
            y = layout.unpack([wire.keys.secret.decrypt(each, scale) for each in blocks])
            assert np.abs(y - weight @ x).max() <= 1e-5 * np.abs(weight @ x).max()

    wire.exchange(send)


@pytest.mark.slow
def test_the_command_answers_as_without_encryption(tmp_path: Path) -> None:
    """With all blocks on the node, and with some of them; the rest is the client's."""
    folder = write_tiny_model(tmp_path / "tiny")
    private = ("--private", "ckks")
    with daemons(folder, tmp_path, *private) as swarm:
        swarm.start_all([Span(0, TINY_BLOCKS)])
        table = ask(folder, swarm, *private, "--stats").stderr.splitlines()
        answers = {
            flags: ask(folder, swarm, *flags).stdout
            for flags in (
                (),
                ("--client-blocks", "1,2"),
                private,
                (*private, "--private-blocks", "1:3"),
                (*private, "--client-blocks", "2,0"),
            )
        }
        opened = re.findall(r"session_opened .*?blocks=(\S+)", swarm.log(swarm.nodes[0]))
    assert len(set(answers.values())) == 1, answers
    assert all(answers.values())
    (header,) = (at for at, line in enumerate(table) if line.startswith("waited for "))
    phases = [line.split("  ")[0] for line in table[header + 1 :]]
    assert phases[-2:] == ["all else", "total"]
    assert {"inputs to be encrypted", "nodes to multiply", "products to be decrypted"} < {*phases}
    assert opened == [f"0:{TINY_BLOCKS}", f"1:{TINY_BLOCKS - 2}"]


def ask(folder: Path, swarm: Daemons, *flags: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "nesa_node", "generate", str(folder), "hello again " * 20, *flags]
    argv += ["--initial-peers", *swarm.addresses, "--max-new-tokens", "6", "--dtype", "float32"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    return done
