"""Hostile messages within a session that was opened as it should be."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import torch

from nesa_node.swarm.protocol.messages import (
    MAX_EPOCH,
    MAX_ROWS,
    Close,
    Closed,
    Link,
    Output,
    Reorder,
    Rollback,
    RowSlice,
)
from tests.hostile.attacker import Attacker, HostileSession
from tests.hostile.frames import (
    MAX_TOKENS,
    ROWS,
    bit_flipped,
    impossible,
    message_frame,
    recordings,
)

BAD, TEN = "bad_frame", "bad_tensor"


async def hostile_steps(attacker: Attacker, count: int) -> None:
    async with _sessions(attacker) as current:
        for _ in range(count):
            session = await current()
            if not session.last_frame:
                await session.advance()
            kind, data, allowed = attacker.rng.choice(_steps(attacker, session))
            await session.attack(f"step: {kind}", data, _or_closed(allowed))


async def hostile_changes(attacker: Attacker, count: int) -> None:
    """Links and rollbacks that cannot be."""
    async with _sessions(attacker, mode="chain") as current:
        for _ in range(count):
            session = await current()
            if not session.last_frame:
                await session.advance()
            kind, data, allowed = attacker.rng.choice(_changes(attacker, session))
            await session.attack(kind, data, _or_closed(*allowed))


async def misplaced_and_mutated_in_session(attacker: Attacker, count: int) -> None:
    """Whatever the recordings hold, whole and mutated, in the middle of a session."""
    rng = attacker.rng
    async with _sessions(attacker) as current:
        for index in range(count):
            session = await current()
            known = [*recordings(attacker.facts, rng), session.step(), session.step(count=2)]
            data = known[index % len(known)]
            kind = rng.choice(["misplaced", "bit flips", "bit flips", "impossible"])
            if kind == "bit flips":
                data = bit_flipped(data, rng)
            elif kind == "impossible":
                data = impossible(rng)
            await session.attack(f"in a session: {kind}", data)
            # A mutation may have gone through as an ordinary step; where it went is not known.
            session.alive = session.alive and kind != "bit flips"


async def closed_politely(attacker: Attacker) -> None:
    """After everything else an ordinary session must still work for this very peer."""
    async with attacker.session() as session:
        await session.link()
        await session.advance()
        answer = await session.say(Close())
        assert isinstance(answer, Closed), f"an honest close was answered by {answer}"


@asynccontextmanager
async def full_session(attacker: Attacker, tokens: int) -> AsyncIterator[None]:
    """A session whose rows hold all that they were promised."""
    async with attacker.session(max_tokens=tokens) as session:
        await session.link()
        rows = tuple(RowSlice(row, 0, tokens) for row in range(ROWS))
        await session.wire.send(session.step(count=ROWS * tokens, rows=rows, want="none"))
        answer = await session.wire.receive()
        assert isinstance(answer, Output), f"an honest step was answered by {answer}"
        yield


def _steps(attacker: Attacker, session: HostileSession) -> list[tuple[str, bytes, str]]:
    rng, step, at = attacker.rng, session.step, session.lengths[0]
    width = attacker.facts.hidden_size
    other_epoch = rng.randint(session.epoch + 1, MAX_EPOCH)
    bad = rng.choice([math.nan, math.inf, -math.inf])
    number = session.last_step
    huge = rng.choice([(1 << 31, 2), (1, 1 << 31), ((1 << 31) - 1, (1 << 31) - 1), (1 << 62, 4)])
    return [
        ("unknown session", step(session=rng.randbytes(16)), "unknown_session"),
        ("older epoch", step(epoch=rng.randrange(session.epoch)), "ignored"),
        ("future epoch", step(epoch=other_epoch), "future_epoch"),
        ("epoch", step(epoch=rng.choice([-1, MAX_EPOCH + 1, -(1 << 63), (1 << 64) - 1])), BAD),
        ("not finite", step(values_with(width, bad, rng)), "not_finite"),
        ("dtype", step(bytes(width * 2), tensor={"dtype": "float16"}), "bad_tensor"),
        ("dtype", step(tensor={"dtype": rng.choice(["int64", "", "f" * 400])}), "bad_tensor"),
        ("codec", step(tensor={"codec": "zip"}), "bad_tensor"),
        ("shape", step(tensor={"shape": rng.choice([(width,), (1, 1, width), (width, 1)])}), TEN),
        ("shape", step(bytes(2 * width * 4), tensor={"shape": (2, width)}), "bad_tensor"),
        ("shape", step(tensor={"shape": (1,) * rng.choice([5, 500])}), "bad_tensor"),
        ("shape", step(b"", tensor={"shape": (0, width)}), "bad_tensor"),
        ("huge shape", step(tensor={"shape": huge}), "bad_tensor"),
        ("negative shape", step(tensor={"shape": (-1, -width)}), "bad_tensor"),
        ("no such row", step(rows=[(rng.randrange(ROWS, MAX_ROWS), 0, 1)]), "bad_rows"),
        ("no such row", step(rows=[(rng.choice([-1, MAX_ROWS, 1 << 60]), at, 1)]), BAD),
        ("row twice", step(count=2, rows=[(0, at, 1), (0, at + 1, 1)]), "bad_rows"),
        ("rows", step(rows=rng.choice([[], [(0, at, 1)] * 300, [(0, at)], [0], "rows"])), BAD),
        ("count", step(rows=[(0, at, rng.choice([0, -1, 1 << 25]))]), BAD),
        ("position", step(rows=[(0, rng.choice([at + 1, at - 1, 10**6]), 1)]), "bad_position"),
        ("position", step(rows=[(0, rng.choice([-1, 1 << 25, 1 << 63]), 1)]), BAD),
        ("stale", step(step=rng.randrange(number)), "stale_step"),
        ("replayed", session.last_frame, "ignored"),
        ("other bytes", _with_other_payload(session.last_frame, rng), "step_conflict"),
        ("too long", step(bytes(width * 4 + 4)), BAD),
        ("interrupted", step(bytes(width * 4 - 4)), BAD),
        ("want", step(want="everything"), BAD),
        ("fields", step(rows=None), BAD),
    ]


def _changes(
    attacker: Attacker, session: HostileSession
) -> list[tuple[str, bytes, tuple[str, ...]]]:
    rng, facts = attacker.rng, attacker.facts
    zeros, epoch, end = (0,) * ROWS, session.epoch + 1, attacker.facts.blocks[1]
    base = Link(epoch=epoch, upstream=None, downstream=None, lengths=zeros, emit_from=zeros)
    back = Rollback(epoch=epoch, lengths=zeros)
    fork = Reorder(epoch=epoch, sources=(ROWS - 1,) * ROWS)

    def down(peer: object, *blocks: object) -> bytes:
        return message_frame(base, downstream={"peer": peer, "blocks": blocks})

    stranger = str(rng.choice([attacker.swarm.identity.peer_id, "nobody", "Q" * 128]))
    lost = ("downstream_lost",)
    return [
        ("link: itself", down(facts.peer_id, end, end + 1), lost),
        ("link: stranger", down(stranger, end, end + 1), lost),
        ("link: cycle", down(facts.peer_id, *facts.blocks), ("bad_link",)),
        ("link: cycle", down(stranger, 0, end), ("bad_link",)),
        ("link: reversed blocks", down(facts.peer_id, end, 0), ("bad_link", "downstream_lost")),
        ("link: no blocks", down(facts.peer_id, end, end), ("bad_link", "downstream_lost")),
        ("link: blocks", down(facts.peer_id, end, 1 << 24), lost),
        ("link: blocks", down(facts.peer_id, end, 1 << 25), (BAD,)),
        ("link: blocks", down(facts.peer_id, end, -1), (BAD,)),
        ("link: nameless", down("", end, end + 1), (BAD,)),
        ("link: nameless", down("\0", end, end + 1), (BAD,)),
        ("link: nameless", down(7, end, end + 1), (BAD,)),
        ("link: rows", message_frame(base, emit_from=(0,)), ("bad_rows",)),
        ("link: rows", message_frame(base, lengths=(), emit_from=()), ("bad_rows",)),
        ("link: rows", message_frame(base, lengths=(0,) * 300), (BAD,)),
        ("link: beyond", message_frame(base, lengths=(MAX_TOKENS, 0)), ("bad_position",)),
        ("link: epoch", message_frame(base, epoch=session.epoch), ("stale_epoch",)),
        ("link: epoch", message_frame(base, epoch=-epoch), (BAD,)),
        ("rollback: beyond", message_frame(back, lengths=(MAX_TOKENS, 0)), ("bad_position",)),
        ("rollback: beyond", message_frame(back, lengths=(1 << 24, 1)), ("bad_position",)),
        ("rollback: beyond", message_frame(back, lengths=(1 << 25, 1)), (BAD,)),
        ("rollback: negative", message_frame(back, lengths=(-1, 0)), (BAD,)),
        ("rollback: rows", message_frame(back, lengths=(0,) * 5), ("bad_rows",)),
        ("rollback: epoch", message_frame(back, epoch=rng.randrange(epoch)), ("stale_epoch",)),
        ("rollback: epoch", message_frame(back, epoch=MAX_EPOCH + 1), (BAD,)),
        ("reorder: rows", message_frame(fork, sources=rng.choice([(), (0,) * 5])), ("bad_rows",)),
        ("reorder: rows", message_frame(fork, sources=(0,) * (MAX_ROWS + 1)), (BAD,)),
        ("reorder: no such row", message_frame(fork, sources=(0, ROWS)), ("bad_rows",)),
        ("reorder: no such row", message_frame(fork, sources=(0, MAX_ROWS)), (BAD,)),
        ("reorder: no such row", message_frame(fork, sources=(-1, 0)), (BAD,)),
        ("reorder: epoch", message_frame(fork, epoch=rng.randrange(epoch)), ("stale_epoch",)),
        ("reorder: epoch", message_frame(fork, epoch=MAX_EPOCH + 1), (BAD,)),
        # Of rows that hold nothing, as everything is after a change here.
        ("reorder: last epoch", message_frame(fork, epoch=MAX_EPOCH), ("reordered",)),
        ("rollback: last epoch", message_frame(back, epoch=MAX_EPOCH), ("rolledback",)),
    ]


def _or_closed(*allowed: str) -> tuple[str, ...]:
    """A fatal answer can be lost: the node closes without having read the ping that follows."""
    return (*allowed, "closed") if {BAD, TEN} & set(allowed) else allowed


def values_with(width: int, value: float, rng: random.Random) -> bytes:
    hidden_D = torch.ones(width)
    hidden_D[rng.randrange(width)] = value
    return hidden_D.numpy().tobytes()


def _with_other_payload(data: bytes, rng: random.Random) -> bytes:
    return data[:-4] + torch.tensor(rng.random()).numpy().tobytes()


@asynccontextmanager
async def _sessions(
    attacker: Attacker, **opening: Any
) -> AsyncIterator[Callable[[], Awaitable[HostileSession]]]:
    """A function that gives the current session, a fresh one whenever the last one ended."""
    async with AsyncExitStack() as stack:
        scope = await stack.enter_async_context(AsyncExitStack())
        session: HostileSession | None = None

        async def current() -> HostileSession:
            nonlocal session
            if session is None or not session.alive or session.epoch >= MAX_EPOCH:
                await scope.aclose()
                session = await scope.enter_async_context(attacker.session(**opening))
                await session.link()
            return session

        yield current
