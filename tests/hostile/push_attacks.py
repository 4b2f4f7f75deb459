"""Hostile pushes, by strangers and by a session's own upstream."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from nesa_node.compression.tensors import TensorMeta
from nesa_node.swarm.protocol.any_message import encode_message
from nesa_node.swarm.protocol.messages import (
    MAX_EPOCH,
    VERSION,
    Cancel,
    Close,
    PushOpen,
    PushOpened,
    Reorder,
    RowSlice,
    Step,
    Sync,
)
from tests.hostile.attacker import HUNG_UP, Attacker, HostileSession, Wire
from tests.hostile.frames import (
    MAX_TOKENS,
    bit_flipped,
    frame,
    impossible,
    message_frame,
    truncated,
)
from tests.hostile.session_attacks import BAD, TEN, values_with

ENDED = ("closed", "unknown_session")
PUSHED = (
    *(HUNG_UP, BAD, TEN, "not_finite", "unexpected", "unknown_session", "future_epoch"),
    *("bad_rows", "bad_position", "cache_full", "step_conflict", "stale_step"),
)


@dataclass(frozen=True, slots=True)
class Victim:
    """What leaked of somebody else's session on the attacked node."""

    session: bytes
    secret: bytes
    epoch: int


async def foreign_pushes(attacker: Attacker, count: int, victim: Callable[[], Victim]) -> None:
    """Into somebody's live chain, knowing ever more of it, as everybody but its upstream."""
    rng = attacker.rng
    for _ in range(count):
        live = victim()
        choices: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
            ("wrong session", {"session": rng.randbytes(16)}, ("unknown_session",)),
            ("wrong secret", {"secret": rng.randbytes(32)}, ("unknown_session",)),
            ("wrong secret", {"secret": bytes(32)}, ("unknown_session",)),
            # The victim may have ended its session meanwhile.
            ("everything but the peer", {}, ("not_upstream", "unknown_session")),
            ("everything, old epoch", {"epoch": 0}, ("not_upstream", "unknown_session")),
            ("version", {"version": (7, 7)}, ("version_mismatch",)),
        ]
        kind, changes, allowed = rng.choice(choices)
        push = PushOpen(version=VERSION, session=live.session, secret=live.secret, epoch=live.epoch)
        step = message_frame(_step_of(live, attacker), bytes(attacker.facts.hidden_size * 4))
        data = message_frame(push, **changes) + step
        await attacker.first(f"push: {kind}", data, allowed)


async def hostile_upstream(attacker: Attacker, count: int) -> None:
    """A session whose upstream is the attacker too: pushes with every right to be there."""
    rng, own = attacker.rng, str(attacker.swarm.identity.peer_id)
    done = 0
    while done < count:
        async with attacker.session(mode="chain", upstream=own) as session:
            await session.link(upstream=own)
            opening = PushOpen(
                version=VERSION, session=session.id, secret=session.secret, epoch=session.epoch
            )
            for _ in range(6):
                kind, data, allowed = rng.choice(_pushed(attacker, session))
                async with attacker.wire() as push:
                    await push.send(frame(encode_message(opening)))
                    answer = await push.receive()
                    assert isinstance(answer, PushOpened), f"an honest push: {answer}"
                    await push.send(data)
                    may_wait = HUNG_UP in allowed
                    answered = await push.outcome(may_wait=may_wait)
                    attacker.tally.note(f"pushed: {kind}", answered, allowed)
                done += 1
                if kind == "bit flips":
                    # It may have been taken for a step; where the session stands is not known.
                    break


async def early_pushes(attacker: Attacker, count: int) -> None:
    """Into an epoch that never begins: two wait for it a while, unless the session ends."""
    own = str(attacker.swarm.identity.peer_id)
    closing = count // 2

    async def push(session: HostileSession, *allowed: str) -> None:
        epoch = attacker.rng.randint(session.epoch + 1, MAX_EPOCH)
        opening = PushOpen(version=VERSION, session=session.id, secret=session.secret, epoch=epoch)
        await attacker.first("early push", frame(encode_message(opening)), allowed)

    async with AsyncExitStack() as stack, asyncio.TaskGroup() as pushes:
        lasting = await stack.enter_async_context(attacker.session(mode="chain", upstream=own))
        for _ in range(count - closing):
            pushes.create_task(push(lasting, "future_epoch"))
        async with attacker.session(mode="chain", upstream=own) as session:
            for _ in range(closing):
                pushes.create_task(push(session, "unknown_session", "future_epoch"))
            await asyncio.sleep(0.5)


async def pushes_that_outlive_their_session(attacker: Attacker, count: int) -> None:
    """An upstream that stays when the session is over must not keep its memory, nor its stream."""
    own = str(attacker.swarm.identity.peer_id)
    for index in range(count):
        async with attacker.wire() as push:
            async with attacker.session(mode="chain", upstream=own) as session:
                await session.link(upstream=own)
                opening = PushOpen(
                    version=VERSION, session=session.id, secret=session.secret, epoch=session.epoch
                )
                await push.send(frame(encode_message(opening)))
                assert isinstance(await push.receive(), PushOpened)
                for data in session.steps_in_order(MAX_TOKENS)[: index % MAX_TOKENS]:
                    await push.send(data)
                if index % 2:
                    await session.say(Close())
            attacker.tally.note("push without a session", await push.outcome(), ENDED)


async def rival_pushes(attacker: Attacker, count: int) -> None:
    """An upstream may hold one stream into a session; a later one ends the one before."""
    own = str(attacker.swarm.identity.peer_id)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(attacker.session(mode="chain", upstream=own))
        await session.link(upstream=own)
        opening = PushOpen(
            version=VERSION, session=session.id, secret=session.secret, epoch=session.epoch
        )
        before: Wire | None = None
        for _ in range(count):
            push = await stack.enter_async_context(attacker.wire())
            await push.send(frame(encode_message(opening)))
            assert isinstance(await push.receive(), PushOpened)
            await push.send(truncated(session.step(), attacker.rng))
            if before is not None:
                attacker.tally.note("rival push", await before.outcome(), ENDED)
            before = push


def _pushed(
    attacker: Attacker, session: HostileSession
) -> list[tuple[str, bytes, tuple[str, ...]]]:
    rng, width = attacker.rng, attacker.facts.hidden_size
    step = session.step
    flipped = bit_flipped(step(), rng)
    return [
        ("unknown session", step(session=rng.randbytes(16)), ("unknown_session",)),
        ("future epoch", step(epoch=session.epoch + 1), ("future_epoch",)),
        ("not finite", step(values_with(width, math.nan, rng)), ("not_finite",)),
        ("huge shape", step(tensor={"shape": (1 << 31, 1 << 31)}), (TEN,)),
        ("position", step(rows=[(0, 5, 1)]), ("bad_position",)),
        ("close", frame(encode_message(Close())), ("unexpected",)),
        ("reorder", message_frame(Reorder(epoch=9, sources=(0, 0))), ("unexpected",)),
        ("sync", message_frame(Sync(lengths=(0, 0))), ("unexpected",)),
        ("push in a push", frame(encode_message(Cancel())), ("unexpected",)),
        ("impossible", impossible(rng), (BAD,)),
        ("truncated", truncated(step(), rng), (HUNG_UP, BAD)),
        ("bit flips", flipped, PUSHED),
    ]


def _step_of(live: Victim, attacker: Attacker) -> Step:
    meta = TensorMeta(dtype="float32", shape=(1, attacker.facts.hidden_size))
    return Step(
        session=live.session, epoch=live.epoch, step=10**6, rows=(RowSlice(0, 0, 1),), tensor=meta
    )
