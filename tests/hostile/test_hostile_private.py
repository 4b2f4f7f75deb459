"""Mutated messages of private sessions, to a node and to a client."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.client.private.private_link import MaskProduct, PrivateLink, SessionKeys
from nesa_node.core.errors import PeerUnreachableError, ProtocolError
from nesa_node.core.ids import PeerId, Span
from nesa_node.core.settings.choices import PrivateScheme
from nesa_node.privacy.encrypted_product import encode_matrix, multiply
from nesa_node.privacy.layout import plan_layout
from nesa_node.privacy.masked_product import (
    Masked,
    encode_integers,
    hide,
    make_integer_linear,
    masked_bytes,
    multiply_encrypted_mask,
    multiply_masked,
    pack_mask_product,
    pack_masked,
    plan_mask_layout,
    quantize_inputs,
    quantize_rows,
    reveal,
)
from nesa_node.privacy.native_ring import make_ring
from nesa_node.privacy.packing import pack_residues
from nesa_node.privacy.parameters import RingParameters
from nesa_node.privacy.product_check import IntegerProductCheck, ProductCheck
from nesa_node.privacy.sampling import random_masks
from nesa_node.privacy.secret_key import SecretKey
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.protocol.messages import Close, Ping
from nesa_node.swarm.protocol.private_messages import (
    PRIVATE_PROTOCOL,
    EncryptedInput,
    EncryptedOutput,
    MaskedInput,
    MaskedOutput,
    PrivateOpen,
    PrivateOpened,
    RotationKey,
)
from nesa_node.swarm.protocol.stream import Stream
from tests.client.local_models import random_ids
from tests.engine.tiny_models import BLOCKS, reference, save_tiny_model
from tests.fuzz.swarm_targets import fed_pipe
from tests.hostile.attacker import (
    DEADLINE_S,
    HUNG_UP,
    UNANSWERED,
    WRONG,
    Tally,
    Wire,
    answer_of,
    attackers,
    describe,
)
from tests.hostile.daemons import connect_to, facts_of
from tests.hostile.frames import Facts, message_frame, mutate
from tests.hostile.gauge import MIB, Gauge, settled
from tests.privacy.keys import expanded_keys
from tests.same_tokens import assert_same_tokens
from tests.swarms import daemons

RING = make_ring(RingParameters())
PATH = "model.layers.0.mlp.down_proj"
INPUTS = 96
"""Of the product at `PATH` of a tiny llama."""
FEW = 300
MANY = pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])
ATTACKERS, AT_ONCE = 4, 3
"""Identities, and streams of each: a node serves four, and sixteen of all."""
GROWTH = 48 * MIB
REFUSALS = (
    "bad_frame", "bad_product", "bad_residues", "bad_tensor", "not_a_member", "unexpected",
    "wrong_model", "busy", HUNG_UP, "closed",
)  # fmt: skip
HARMLESS = ("privateopened", "encryptedoutput", "maskedoutput")
"""A mutation may change what every value is good for, such as a seed."""

pytestmark = pytest.mark.timeout(600)


def frames(
    facts: Facts, keys: SessionKeys, scheme: PrivateScheme
) -> tuple[list[list[bytes]], list[bytes]]:
    """What clients send until their first product, of each kind, and other messages."""
    ring = keys.ring
    residues = pack_residues(ring, np.zeros((3, ring.degree), np.uint32))
    opening = PrivateOpen(model=facts.model_id, scheme=scheme, seed=keys.seed)
    asked = EncryptedInput(request=0, path=PATH, seeds=(bytes(32),), nbytes=len(residues))
    values = bytes(masked_bytes(INPUTS))
    masked = MaskedInput(request=0, path=PATH, tokens=1, nbytes=len(values))
    opened, product = message_frame(opening), message_frame(asked, residues)
    if scheme == "masks":
        orders = [[opened, product], [opened, message_frame(masked, values)]]
    else:
        packed = {steps: keys.packed(steps) for steps in (1, 2, 3)}
        rotations = [
            message_frame(RotationKey(steps=steps, nbytes=len(each)), each)
            for steps, each in packed.items()
        ]
        orders = [[opened, *rotations, product]]
    others = [
        message_frame(masked, values),
        message_frame(masked, values, tokens=2),
        message_frame(masked, values, tokens=1 << 40),
        message_frame(masked, values, nbytes=1 << 62),
        message_frame(MaskedOutput(request=0, nbytes=0)),
        message_frame(PrivateOpened(blocks=(0, 3), rotations=(1, 2, 3))),
        message_frame(EncryptedOutput(request=0, token=0, scale=2.0**40, nbytes=0)),
        message_frame(asked, residues[:-1]),
        message_frame(asked, residues, path="x" * 600),
        message_frame(asked, residues, seeds=[bytes(32)] * 300),
        message_frame(asked, residues, nbytes=1 << 40),
        message_frame(asked, residues, request=-1),
        message_frame(opening, scheme="plain"),
        message_frame(opening, model="m" * 300),
        message_frame(RotationKey(steps=1, nbytes=0), steps=1 << 30),
        message_frame(Close()),
        message_frame(Ping(nonce=1)),
    ]
    return orders, others


async def attack(
    swarms: Sequence[Swarm],
    target: Facts,
    tally: Tally,
    count: int,
    *,
    scheme: PrivateScheme,
    seed: int,
) -> None:
    """Each stream is as it should be up to one message."""
    rng = random.Random(seed)
    orders, others = frames(target, SessionKeys(RING), scheme)
    left = count

    async def worker(swarm: Swarm) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            order = rng.choice(orders)
            at = rng.choices(range(len(order)), weights=(6, *[1] * (len(order) - 2), 2))[0]
            pipes = await swarm.transport.open_stream(
                PeerId(target.peer_id), PRIVATE_PROTOCOL, timeout_s=DEADLINE_S
            )
            wire = Wire(PeerId(target.peer_id), *pipes)
            try:
                for data in order[:at]:
                    await wire.send(data)
                if at:
                    answer = await wire.receive()
                    if not isinstance(answer, PrivateOpened):
                        tally.note(
                            "open", "closed" if answer is None else describe(answer), REFUSALS
                        )
                        continue
                await wire.send(mutate(order[at], [*order, *others], rng))
                tally.note(f"message {at}", await answer_of(wire), (*REFUSALS, *HARMLESS))
            finally:
                await wire.stream.close()

    async with asyncio.TaskGroup() as workers:
        for swarm in swarms:
            for _ in range(AT_ONCE):
                workers.create_task(worker(swarm))


@contextmanager
def private_client(
    folder: Path, addresses: Sequence[str], scheme: PrivateScheme
) -> Iterator[list[Any]]:
    """An honest client, and what it generated; it ends with the context."""
    found: list[Any] = []
    over = threading.Event()
    prompt = random_ids(1, 5)

    def generate() -> None:
        with AutoDistributedModelForCausalLM.from_pretrained(
            folder, initial_peers=addresses, dtype=torch.float32, private=scheme
        ) as model:
            while not over.is_set():
                try:
                    tokens = model.generate(prompt, max_new_tokens=4, do_sample=False)
                    assert_same_tokens(
                        reference(folder), tokens, prompt, max_new_tokens=4, do_sample=False
                    )
                except BaseException as error:  # of a thread, which a test would not see
                    found.append(error)
                    return
                found.append(tokens)

    thread = threading.Thread(target=generate)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def wait_for(found: list[Any], count: int) -> None:
    deadline = time.monotonic() + 60
    while len(found) < count:
        assert time.monotonic() < deadline, "an honest session does not go on"
        time.sleep(0.1)


@pytest.mark.parametrize("count", [FEW, MANY])
@pytest.mark.parametrize("scheme", ["ckks", "masks"])
async def test_a_node_refuses_mutated_messages_and_serves_on(
    tmp_path: Path, scheme: PrivateScheme, count: int
) -> None:
    folder = save_tiny_model("llama", tmp_path)
    with daemons(folder, tmp_path, "--private", scheme, "--record-ttl-s", "3") as running:
        (node,) = running.start_all([Span(0, BLOCKS)])
        async with attackers(tmp_path, running.addresses, ATTACKERS) as swarms:
            (target,) = await facts_of([node], swarms[0])
            for swarm in swarms:
                await connect_to([target], swarm)
            tally = Tally()
            with private_client(folder, running.addresses, scheme) as found:
                await asyncio.to_thread(wait_for, found, 1)
                await attack(swarms, target, tally, count // 10, scheme=scheme, seed=1)
                before = Gauge.of(node.process.pid)
                generated = len(found)
                await attack(swarms, target, tally, count - count // 10, scheme=scheme, seed=2)
                await asyncio.to_thread(wait_for, found, generated + 1)
            errors = [each for each in found if isinstance(each, BaseException)]
            assert not errors, errors
        after = settled(node.process.pid, before.files, 30.0)
        print(tally.summary(), before, after, sep="\n")
        assert node.process.poll() is None
        assert tally.frames == count
        assert not tally.failures()
        assert after.rss - before.rss < GROWTH
        bad = [
            line for line in running.log(node).splitlines() if "failed" in line or "Traceb" in line
        ]
        assert not bad, bad[:3]


class ClientAnswers:
    """A node's answer, and what a client makes of it when it is changed."""

    payload: bytes
    honest: EncryptedOutput | MaskedOutput

    async def take(self, data: bytes) -> str:
        try:
            return await self.multiply(link_of(data))
        except (PeerUnreachableError, ProtocolError) as error:
            return type(error).__name__

    @abstractmethod
    async def multiply(self, link: PrivateLink) -> str:
        """Ask the link once, and judge its answer."""


class EncryptedAnswers(ClientAnswers):
    """To encrypted vectors."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        weight = rng.normal(size=(10, 8))
        self.layout = plan_layout(10, 8, RING.parameters.slots)
        self.keys = SessionKeys(RING)
        self.check = ProductCheck(RING.parameters, [weight])
        self.x = rng.uniform(-1, 1, (1, 8))
        self.y = weight @ self.x[0]
        self.tokens = [[self.keys.secret.encrypt(slots) for slots in self.layout.pack(self.x[0])]]
        matrix = encode_matrix(RING, self.layout, weight)
        rotations = expanded_keys(self.keys.secret, RING, [self.layout])
        products = multiply(RING, matrix, [each.expand(RING) for each in self.tokens[0]], rotations)
        self.payload = pack_residues(RING, np.stack(products))
        self.honest = EncryptedOutput(
            request=0, token=0, scale=matrix.scale, nbytes=len(self.payload)
        )

    async def multiply(self, link: PrivateLink) -> str:
        ((blocks, scale),) = await link.multiply(PATH, self.layout, self.tokens)
        y = self.layout.unpack([self.keys.secret.decrypt(each, scale) for each in blocks])
        if not self.check.accepts(self.x, y[None]):
            return "wrong product"
        return "right product" if np.abs(y - self.y).max() < 1e-5 else f"{WRONG}: accepted"


class MaskAnswers(ClientAnswers):
    """To an encrypted mask."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.integers, _ = quantize_rows(rng.normal(size=(16, 8)))
        self.layout = plan_mask_layout(16, 8, RING.degree)
        self.secret = SecretKey(RING)
        self.check = IntegerProductCheck([self.integers.astype(np.float64)])
        self.x, _ = quantize_inputs(rng.uniform(-1, 1, (1, 8)))
        self.y = self.x @ self.integers.astype(np.int64).T
        self.mask = random_masks(1, 8)
        self.masked = hide(self.x, self.mask)
        self.answer = multiply_masked(make_integer_linear(self.integers), self.masked)
        split = self.layout.split(self.mask[0], RING.degree)
        self.tokens = [[self.secret.encrypt_mask(chunk) for chunk in split]]
        ciphertexts = np.stack([each.expand(RING) for each in self.tokens[0]])
        encoded = encode_integers(RING, self.layout, self.integers)
        self.product = multiply_encrypted_mask(RING, self.layout, encoded, ciphertexts)
        self.payload = pack_mask_product(RING, *self.product)
        self.honest = EncryptedOutput(request=0, token=0, nbytes=len(self.payload))

    async def multiply(self, link: PrivateLink) -> str:
        (product,) = await link.multiply_masks(PATH, self.layout, self.tokens)
        return self.judge(self.answer, product)

    def judge(self, answer: Masked, product: MaskProduct) -> str:
        numbers_BR = self.secret.decrypt_products(*product, self.layout.places)
        y = reveal(answer, numbers_BR.reshape(1, -1)[:, :16])
        if not self.check.accepts(self.x, y):
            return "wrong product"
        # What floats lose in the check may pass: the lowest bits of 40.
        is_right = np.abs(y - self.y).max() <= 1e-10 * np.abs(self.y).max()
        return "right product" if is_right else f"{WRONG}: accepted"


class MaskedAnswers(MaskAnswers):
    """To a masked vector."""

    def __init__(self) -> None:
        super().__init__()
        self.payload = pack_masked(self.answer)
        self.honest = MaskedOutput(request=0, nbytes=len(self.payload))

    async def multiply(self, link: PrivateLink) -> str:
        return self.judge(await link.multiply_masked(PATH, self.masked, 16), self.product)


def link_of(data: bytes) -> PrivateLink:
    """A link to a node that sends these bytes."""
    pipe = fed_pipe(data)
    return PrivateLink(Stream(PeerId("node"), pipe, pipe), Span(0, 1), RING)


@pytest.mark.parametrize("count", [FEW, MANY])
@pytest.mark.parametrize("kind", [EncryptedAnswers, MaskAnswers, MaskedAnswers])
async def test_a_client_takes_no_mutated_answer(kind: type[ClientAnswers], count: int) -> None:
    """Answers that are cut, flipped, of other tokens, or with other residues and scales."""
    answers, rng, told = kind(), random.Random(0), Counter[str]()
    honest = message_frame(answers.honest, answers.payload)
    assert await answers.take(honest) == "right product"
    size = len(answers.payload)
    changes: list[dict[str, Any]] = [{"request": 7}, {"nbytes": 1 << 62}]
    if isinstance(answers.honest, EncryptedOutput):
        scale = answers.honest.scale
        changes += [{"token": 1}, {"scale": scale * 1.01}, {"scale": float("nan")}]
        changes += [{"scale": 2.0**-60}]
    others = [
        *[message_frame(answers.honest, answers.payload, **change) for change in changes],
        message_frame(answers.honest, bytes(size)),
        message_frame(answers.honest, b"\xff" * size),
        message_frame(answers.honest, answers.payload[: size // 2], nbytes=size // 2),
        message_frame(RotationKey(steps=1, nbytes=0)),
    ]

    def residues_changed() -> bytes:
        payload = bytearray(answers.payload)
        for _ in range(rng.choice([1, 1, 8])):
            payload[rng.randrange(size)] ^= 1 << rng.randrange(8)
        return message_frame(answers.honest, bytes(payload))

    process = psutil.Process()
    before = 0
    for number in range(count):
        data = residues_changed() if number % 2 else mutate(honest, others, rng)
        told[await answers.take(data)] += 1
        if number == count // 10:
            gc.collect()
            before = process.memory_info().rss
    gc.collect()
    print(told)
    assert process.memory_info().rss - before < GROWTH
    assert not [each for each in told if each.startswith((WRONG, UNANSWERED))], told
    # What is flipped in a first polynomial is lost in most places, when segments are added.
    assert told["wrong product"] > count * 0.2
    assert told["right product"] < count * 0.4
