"""What a client may send to a node that trains, and what it should not. T tokens, D hidden."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch
from torch import Tensor

from nesa_node.compression import tensors
from nesa_node.core.ids import ModelId
from nesa_node.engine.training.training_state import hash_state
from nesa_node.swarm.dht.training_notices import SessionPlan, TrainingNotice
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.swarm.protocol.any_message import AnyMessage, encode_message
from nesa_node.swarm.protocol.messages import VERSION, ErrorMessage, Message, Ping, Pong
from nesa_node.swarm.protocol.stream import FRAME_TIMEOUT_S
from nesa_node.swarm.protocol.training_messages import (
    TrainApplied,
    TrainApply,
    TrainBackward,
    TrainBegan,
    TrainBegin,
    TrainForward,
    TrainGradient,
    TrainNorm,
    TrainOpen,
    TrainOpened,
    TrainOutput,
    TrainPull,
    TrainState,
    TrainTensor,
)
from tests.hostile.attacker import Attacker, Wire, describe
from tests.hostile.frames import frame, message_frame

TOKENS = 8
MAX_TOKENS, MAX_KEPT_TOKENS = 32, 64
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8.0, "modules": ["q_proj", "v_proj"]}
SPEC: dict[str, Any] = {"optimizer": {"name": "adamw"}, "seed": 1, "lora": LORA}
ANSWERED_S = 20.0
UNREAD = ("trainstate", "traintensor", "closed")
"""The last thing read before the end of the stream."""


def encode_spec(**changes: Any) -> bytes:
    return msgspec.msgpack.encode(SPEC | changes)


def make_plan(opened: dict[str, Any], **changes: Any) -> SessionPlan:
    fields: dict[str, Any] = {
        "session": opened["session"].hex(),
        "spec": hashlib.sha256(opened["spec"]).hexdigest(),
        "max_tokens": opened["max_tokens"],
        "checkpoint_every": 20,
        "replicas": 1,
        "zero_stage": 0,
        "average_every": 1,
    }
    return SessionPlan(**fields | changes)


def train_open(attacker: Attacker, *, planned: bool = True, **changes: Any) -> TrainOpen:
    """An open, with `changes` in its plan too where they belong there, if it is `planned`."""
    facts = attacker.facts
    fields: dict[str, Any] = {
        "version": VERSION,
        "model": facts.model_id,
        "session": attacker.rng.randbytes(16),
        "blocks": (facts.blocks[0], facts.blocks[1]),
        "spec": encode_spec(),
        "max_tokens": MAX_TOKENS,
        "max_kept_tokens": MAX_KEPT_TOKENS,
    }
    plan = make_plan(fields | changes if planned else fields)
    fields["notice"], fields["plan"] = sign_plan(attacker, plan), plan.digest
    return TrainOpen(**fields | changes)


def sign_plan(attacker: Attacker, *plans: SessionPlan) -> bytes:
    model = ModelId(attacker.facts.model_id)
    return attacker.swarm.notices.sign(TrainingNotice, model, ttl_s=600.0, plans=plans)[1]


@dataclass
class HostileTraining:
    """A training session from whose ordinary course single messages deviate."""

    wire: Wire
    hidden_size: int
    plan: bytes
    step: int = 0

    async def ask(self, data: bytes) -> AnyMessage | None:
        """The first answer to a message that is no pong."""
        await self.wire.send(data)
        return await self.next()

    async def next(self) -> AnyMessage | None:
        while isinstance(message := await self.wire.receive(ANSWERED_S), Pong):
            pass
        return message

    async def say(self, message: Message, payload: bytes = b"", **changes: Any) -> str:
        answer = await self.ask(message_frame(message, payload, **changes))
        return "closed" if answer is None else describe(answer)

    def begin_frame(self, **changes: Any) -> bytes:
        return message_frame(TrainBegin(step=self.step, plan=self.plan), **changes)

    async def begin(self) -> None:
        answer = await self.ask(self.begin_frame())
        assert isinstance(answer, TrainBegan), answer

    def forward(
        self, micro: int = 0, hidden_TD: Tensor | None = None, codec: str = "none", **changes: Any
    ) -> bytes:
        hidden_TD = self.hidden() if hidden_TD is None else hidden_TD
        meta, payload = tensors.encode(hidden_TD, codec=codec)
        message = TrainForward(step=self.step, micro=micro, texts=((TOKENS,),), seed=1, tensor=meta)
        return message_frame(message, bytes(payload), **changes)

    def backward(self, micro: int = 0, grad_TD: Tensor | None = None, **changes: Any) -> bytes:
        meta, payload = tensors.encode(self.hidden() if grad_TD is None else grad_TD)
        message = TrainBackward(step=self.step, micro=micro, tensor=meta)
        return message_frame(message, bytes(payload), **changes)

    def apply(self, **changes: Any) -> bytes:
        message = TrainApply(step=self.step, micro_batches=1, learning_rate=1e-3, scale=1.0)
        return message_frame(message, **changes)

    def hidden(self, value: float = 0.5) -> Tensor:
        return torch.full((TOKENS, self.hidden_size), value)

    async def one_step(self) -> None:
        """An ordinary step."""
        await self.begin()
        assert isinstance(await self.ask(self.forward()), TrainOutput)
        assert isinstance(await self.ask(self.backward()), TrainGradient)
        assert isinstance(await self.ask(self.apply()), TrainApplied)
        self.step += 1

    async def pull(self) -> dict[str, Tensor]:
        await self.wire.send(message_frame(TrainPull()))
        state, found = await self.next(), {}
        assert isinstance(state, TrainState), state
        for _ in range(state.tensors):
            message, payload = await self.wire.stream.receive(max_tensor_bytes=1 << 24)
            assert isinstance(message, TrainTensor)
            found[message.name] = tensors.decode(message.tensor, payload, max_bytes=1 << 24)
        return found

    async def push(self, state: dict[str, Tensor], **changes: Any) -> str:
        """Send a state; its digest is right unless changed."""
        head = TrainState(applied=self.step, tensors=len(state), digest=hash_state(state))
        await self.wire.send(message_frame(head, **changes))
        for name, value in state.items():
            meta, payload = tensors.encode(value)
            await self.wire.send(message_frame(TrainTensor(name=name, tensor=meta), bytes(payload)))
        answer = await self.next()
        return "closed" if answer is None else describe(answer)

    async def settle(self) -> list[str]:
        """All answers that come before that to a ping which is sent after the queue is empty."""
        await self.wire.send(message_frame(TrainNorm(step=1 << 40)))
        found: list[str] = []
        while (message := await self.next()) is not None:
            if isinstance(message, ErrorMessage) and message.answers == "trainnorm":
                break
            found.append(describe(message))
        return found


@asynccontextmanager
async def training(attacker: Attacker, **changes: Any) -> AsyncIterator[HostileTraining]:
    """A training session that was opened as it should be."""
    async with attacker.wire() as wire:
        opening = train_open(attacker, **changes)
        await wire.send(message_frame(opening))
        answer = await wire.receive(60.0)
        assert isinstance(answer, TrainOpened), f"an honest open was answered by {answer}"
        yield HostileTraining(wire, attacker.facts.hidden_size, opening.plan)


NAMES = [f"m{number}" for number in range(2000)]
BAD_OPENS: Sequence[tuple[str, dict[str, Any], tuple[str, ...]]] = (
    ("rank of a billion", {"spec": encode_spec(lora=LORA | {"r": 10**9})}, ("bad_spec",)),
    ("a million modules", {"spec": encode_spec(lora=LORA | {"modules": NAMES * 3})}, ("bad_spec",)),
    ("a pattern", {"spec": encode_spec(lora=LORA | {"modules": ["(a+)+$"]})}, ("bad_spec",)),
    ("a line end", {"spec": encode_spec(lora=LORA | {"modules": ["q_proj\n"]})}, ("bad_spec",)),
    ("unknown field", {"spec": encode_spec(lora=LORA | {"x": 1})}, ("bad_spec",)),
    ("nested junk", {"spec": b"\x91" * 30_000}, ("bad_spec",)),
    ("no spec", {"spec": b""}, ("bad_spec",)),
    ("long spec", {"spec": b"\xa1a" * (1 << 14)}, ("bad_spec",)),
    ("two kinds", {"spec": encode_spec(deep_prompt={})}, ("bad_spec",)),
    ("alpha is NaN", {"spec": encode_spec(lora=LORA | {"lora_alpha": math.nan})}, ("bad_spec",)),
    ("no such layer", {"spec": encode_spec(lora=LORA | {"layers_to_transform": [999]})},
     ("bad_spec",)),
    ("no such module", {"spec": encode_spec(lora=LORA | {"modules": ["zzz"]})}, ("bad_spec",)),
    ("a norm", {"spec": encode_spec(lora=LORA | {"modules": ["input_layernorm"]})},
     ("bad_spec",)),
    ("all modules of one layer", {"spec": encode_spec(
        lora=LORA | {"modules": ["all-linear"], "layers_to_transform": [0]})}, ("bad_spec",)),
    ("no subset", {"spec": encode_spec(lora=None, ia3={
        "modules": ["q_proj"], "feedforward_modules": ["k_proj"]})}, ("bad_spec",)),
    ("many ranks", {"spec": encode_spec(
        lora=LORA | {"rank_pattern": dict.fromkeys(NAMES[:1000], 1)})}, ("bad_spec",)),
    ("large bottleneck", {"spec": encode_spec(lora=None, bottleneck={"size": 10**9})},
     ("too_large",)),
    ("many virtual tokens", {"spec": encode_spec(
        lora=None, deep_prompt={"num_virtual_tokens": 10**12})}, ("too_large",)),
    ("negative momentum", {"spec": encode_spec(optimizer={"name": "sgd", "momentum": -1.0})},
     ("bad_spec",)),
    ("betas of two", {"spec": encode_spec(optimizer={"betas": [2.0, 2.0]})}, ("bad_spec",)),
    ("most tokens", {"max_tokens": 1 << 24, "max_kept_tokens": 1 << 24}, ("too_large",)),
    ("a long row", {"max_tokens": 15_000, "max_kept_tokens": 15_000}, ("too_large",)),
    ("many kept tokens", {"max_kept_tokens": 1 << 24}, ("too_large",)),
    ("fewer kept tokens", {"max_kept_tokens": 1}, ("bad_spec",)),
    ("tokens out of bounds", {"max_tokens": 1 << 40}, ("bad_frame",)),
    ("no blocks", {"blocks": [2, 2]}, ("wrong_blocks",)),
    ("other blocks", {"blocks": [0, 4000]}, ("wrong_blocks",)),
    ("another model", {"model": "x"}, ("wrong_model",)),
    ("another quality", {"quality": "best"}, ("unknown_quality",)),
)  # fmt: skip
"""Changes of an open, and how the node may answer."""


async def bad_opens(attacker: Attacker) -> None:
    for kind, changes, allowed in BAD_OPENS:
        await attacker.first(kind, message_frame(train_open(attacker, **changes)), allowed)


async def bad_plans(attacker: Attacker) -> None:
    """Sessions that are not what their client has signed, or has announced to all."""
    refused = ("plan_mismatch",)
    for kind, changes in (
        ("another spec", {"spec": encode_spec(seed=2)}),
        ("more tokens", {"max_tokens": MAX_TOKENS + 1}),
        ("partitions", {"partitions": 2}),
        ("no notice", {"notice": b""}),
        ("junk as a notice", {"notice": b"\x91" * 4000}),
        ("another plan", {"plan": bytes(32)}),
    ):
        opening = train_open(attacker, planned=False, **changes)
        await attacker.first(kind, message_frame(opening), refused)
    honest = train_open(attacker)
    with TemporaryDirectory() as folder:
        model, plan = ModelId(attacker.facts.model_id), make_plan(msgspec.structs.asdict(honest))
        other = attacker.swarm.notices.signed_by(Identity.ephemeral(Path(folder)))
        stolen = other.sign(TrainingNotice, model, ttl_s=600.0, plans=(plan,))[1]
    changed = msgspec.structs.replace(honest, notice=stolen)
    await attacker.first("another peer's notice", message_frame(changed), refused)
    notices = attacker.swarm.notices
    await notices.publish(TrainingNotice, model, ttl_s=600.0, plans=())
    await attacker.first("withdrawn", message_frame(honest), refused)


async def bad_passes(attacker: Attacker) -> None:
    """Refused messages, after which the same session goes on."""
    async with training(attacker) as session:
        await session.begin()
        wide = torch.ones(TOKENS, session.hidden_size + 1)
        refused: list[tuple[str, bytes, tuple[str, ...]]] = [
            ("too wide", session.forward(0, wide), ("bad_tensor",)),
            ("too few texts", session.forward(texts=[[TOKENS - 1]]), ("bad_tensor",)),
            ("NaN forward", session.forward(0, session.hidden(math.nan)), ("not_finite",)),
            ("inf forward", session.forward(0, session.hidden(math.inf)), ("not_finite",)),
            ("codec", session.forward(0, codec="bfloat16"), ("bad_tensor",)),
            ("another step", session.forward(step=5), ("stale_step",)),
            ("backward first", session.backward(), ("stale_step",)),
            ("apply first", session.apply(), ("stale_step",)),
            ("apply of another step", session.apply(step=7), ("stale_step",)),
            ("begin another step", session.begin_frame(step=3), ("stale_step",)),
            ("begin for another plan", session.begin_frame(plan=bytes(32)), ("plan_mismatch",)),
            ("norm of another step", message_frame(TrainNorm(step=3)), ("stale_step",)),
            ("an answer", message_frame(TrainBegan(step=0, plan=bytes(32))), ("unexpected",)),
        ]
        for kind, data, allowed in refused:
            answer = await session.ask(data)
            attacker.tally.note(kind, describe(answer) if answer else "closed", allowed)
        for micro in range(2):
            assert isinstance(await session.ask(session.forward(micro)), TrainOutput)
        for kind, data, allowed in (
            ("NaN gradient", session.backward(0, session.hidden(math.nan)), ("not_finite",)),
            ("wide gradient", session.backward(0, wide), ("bad_tensor",)),
            ("second before first", session.backward(1), ("stale_step",)),
            ("backward", session.backward(0), ("traingradient",)),
            ("backward twice", session.backward(0), ("stale_step",)),
            ("forward after backward", session.forward(0), ("stale_step",)),
            ("apply with a wrong count", session.apply(micro_batches=2), ("stale_step",)),
            ("apply", session.apply(), ("trainapplied",)),
            ("apply twice", session.apply(), ("trainapplied",)),
        ):
            answer = await session.ask(data)
            attacker.tally.note(kind, describe(answer) if answer else "closed", allowed)
        session.step = 1
        await session.one_step()


async def exploding(attacker: Attacker) -> None:
    """Finite numbers that become infinite."""
    async with training(attacker) as session:
        await session.begin()
        huge = session.hidden(1e38)
        answer = await session.ask(session.forward(0, huge))
        kind = describe(answer) if answer else "closed"
        attacker.tally.note("huge forward", kind, ("not_finite", "trainoutput"))
        await session.begin()
        assert isinstance(await session.ask(session.forward()), TrainOutput)
        answer = await session.ask(session.backward(0, huge))
        kind = describe(answer) if answer else "closed"
        attacker.tally.note("huge gradient", kind, ("not_finite", "traingradient"))
        norm = await session.say(TrainNorm(step=0))
        attacker.tally.note("its norm", norm, ("not_finite", "trainnormed"))
        answer = await session.ask(session.apply())
        kind = describe(answer) if answer else "closed"
        attacker.tally.note("its apply", kind, ("bad_tensor", "trainapplied"))


FATAL: Sequence[tuple[str, dict[str, Any], tuple[str, ...]]] = (
    ("several texts in rows", {"texts": [[4, 4], [4]]}, ("bad_rows",)),
    ("more tokens than promised", {"texts": [[MAX_TOKENS], [1]]}, ("too_large",)),
    ("no texts", {"texts": []}, ("bad_frame",)),
    ("huge text", {"texts": [[1 << 30]]}, ("bad_frame",)),
    ("gibibyte", {"tensor": {"dtype": "float32", "shape": [1 << 18, 1 << 10]}}, ("bad_tensor",)),
    ("huge shape", {"tensor": {"dtype": "float32", "shape": [1 << 31] * 3}},
     ("bad_tensor", "bad_frame")),
    ("dtype", {"tensor": {"dtype": "int64", "shape": [8, 64]}}, ("bad_tensor",)),
    ("negative micro", {"micro": -1}, ("bad_frame",)),
)  # fmt: skip


async def fatal_messages(attacker: Attacker) -> None:
    for kind, changes, allowed in FATAL:
        async with training(attacker) as session:
            await session.begin()
            await session.wire.send(session.forward(**changes))
            attacker.tally.note(kind, await session.wire.outcome(), allowed)
    for kind, rate in (("NaN", math.nan), ("infinite", math.inf), ("huge", 1e300)):
        async with training(attacker) as session:
            await session.wire.send(session.apply(learning_rate=rate))
            attacker.tally.note(f"{kind} rate", await session.wire.outcome(), ("bad_frame",))
    async with training(attacker) as session:
        await session.begin()
        for micro in range(MAX_KEPT_TOKENS // TOKENS + 1):
            await session.wire.send(session.forward(micro))
        attacker.tally.note("more than kept", await session.wire.outcome(), ("too_large",))


async def bad_states(attacker: Attacker) -> None:
    async with training(attacker) as session:
        await session.one_step()
        right = await session.pull()
        name = next(each for each in right if each.startswith("adapter."))
        owner = name.removeprefix("adapter.")
        first, second, count = (
            f"optimizer.{key}.{owner}" for key in ("exp_avg", "exp_avg_sq", "step")
        )
        wrong: list[tuple[str, dict[str, Tensor], dict[str, Any], tuple[str, ...]]] = [
            ("digest", right, {"digest": bytes(32)}, ("bad_tensor",)),
            ("too many", {}, {"tensors": 1 << 19}, ("too_large",)),
            ("missing", {k: v for k, v in right.items() if k != name}, {}, ("bad_tensor",)),
            ("half a state", {k: v for k, v in right.items() if k != first}, {}, ("bad_tensor",)),
            ("shape", right | {name: right[name][:1]}, {}, ("bad_tensor",)),
            ("one number", right | {first: torch.ones(())}, {}, ("bad_tensor",)),
            ("other key", {k.replace("exp_avg.", "other."): v for k, v in right.items()}, {},
             ("bad_tensor",)),
            ("negative count", right | {count: torch.tensor(-1.0)}, {}, ("bad_tensor",)),
            ("negative square", right | {second: -torch.ones_like(right[second])}, {},
             ("bad_tensor",)),
            ("NaN", right | {name: right[name] * math.nan}, {}, ("not_finite",)),
            ("half precision", right | {name: right[name].half()}, {}, ("bad_tensor",)),
            ("other block", {k.replace("layers.", "layers.99"): v for k, v in right.items()}, {},
             ("bad_tensor",)),
        ]  # fmt: skip
        for kind, state, changes, allowed in wrong:
            answer = await session.push(state, **changes)
            attacker.tally.note(f"state: {kind}", answer, allowed)
            await session.settle()
        assert await session.push(right) == "trainrestored"
        await session.one_step()


async def floods(attacker: Attacker) -> None:
    """Many messages at once, whose answers are read."""
    for kind, data in (
        ("begins", b""),
        ("norms", message_frame(TrainNorm(step=0))),
        ("pulls", message_frame(TrainPull())),
        ("pings", frame(encode_message(Ping(nonce=1)))),
    ):
        async with training(attacker) as session:
            await session.wire.send((data or session.begin_frame()) * 200)
            await session.settle()
            attacker.tally.note(kind, "settled")


def send_much(session: HostileTraining) -> None:
    """Pulls whose answers are not read, and gradients for nothing that are as large as allowed."""
    for _ in range(300):
        session.wire.writer.write(message_frame(TrainPull()))
    large = torch.ones(MAX_TOKENS, session.hidden_size)
    for _ in range(2000):
        session.wire.writer.write(session.backward(9, large))


async def unread(attacker: Attacker) -> None:
    """The node gives up a client that reads nothing."""
    async with training(attacker) as session:
        send_much(session)
        await asyncio.sleep(FRAME_TIMEOUT_S + 5)
        attacker.tally.note("unread", await session.wire.outcome(), UNREAD)


async def vanish(attacker: Attacker) -> None:
    for part in (0.2, 0.9):
        async with training(attacker) as session:
            await session.begin()
            data = session.forward()
            await session.wire.send(data[: int(len(data) * part)])
        attacker.tally.note("vanished", "hung up")


async def open_and_close(attacker: Attacker) -> None:
    for _ in range(12):
        async with training(attacker):
            pass
        attacker.tally.note("opened and left", "opened")
