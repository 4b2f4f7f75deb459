"""Hostile hand-overs: by donors, by those who would be one, and by clients who ask for them."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, get_args

import torch

from nesa_node.compression import tensors
from nesa_node.compression.tensors import TensorMeta
from nesa_node.swarm.protocol.any_message import encode_message
from nesa_node.swarm.protocol.messages import (
    MAX_EPOCH,
    MAX_ROWS,
    VERSION,
    Close,
    Closed,
    Downstream,
    ErrorMessage,
    HandedOver,
    HandOver,
    Link,
    Linked,
    Output,
    Pages,
    Ping,
    Pong,
    Priority,
    Reorder,
    Rollback,
    Step,
    Sync,
    Synced,
    TransferOpen,
    TransferOpened,
)
from nesa_node.swarm.protocol.messages import MAX_TOKENS as MOST_TOKENS
from tests.hostile.attacker import HUNG_UP, Attacker, HostileSession, Wire, describe
from tests.hostile.frames import (
    MAX_TOKENS,
    ROWS,
    bit_flipped,
    frame,
    impossible,
    message_frame,
    truncated,
)
from tests.hostile.push_attacks import Victim
from tests.hostile.session_attacks import BAD, TEN

Case = tuple[str, bytes, tuple[str, ...]]

REFUSED = ("bad_rows", "bad_position", TEN, "not_finite")
MUTATED = (HUNG_UP, BAD, "unexpected", "synced", *REFUSED)
LOST = ("downstream_lost",)


class InTurn:
    """Draws each of some cases before any comes again."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._left: list[int] = []

    def draw(self, cases: Sequence[Case]) -> Case:
        if not self._left:
            self._left = self._rng.sample(range(len(cases)), len(cases))
        return cases[self._left.pop()]


async def strange_donors(attacker: Attacker, count: int) -> None:
    """Whoever is not the donor, or comes too late, is not let in."""
    rng, own = attacker.rng, str(attacker.swarm.identity.peer_id)
    somebody = attacker.facts.peer_id
    done = 0
    while done < count:
        for donor, linked, refusal in (
            (own, True, "unexpected"),
            (somebody, False, "not_donor"),
            (None, False, "not_donor"),
            (None, True, "not_donor"),
        ):
            async with attacker.session(mode="chain", donor=donor) as session:
                if linked:
                    await session.link()
                opening = _opening(session)
                for kind, changes, allowed in (
                    ("wrong session", {"session": rng.randbytes(16)}, "unknown_session"),
                    ("wrong secret", {"secret": rng.randbytes(32)}, "unknown_session"),
                    ("version", {"version": (7, 7)}, "version_mismatch"),
                    (f"{refusal} with everything else", {}, refusal),
                ):
                    data = message_frame(opening, **changes)
                    await attacker.first(f"transfer: {kind}", data, (allowed,))
                    done += 1
                await _closed(session)


async def foreign_transfers(attacker: Attacker, count: int, victim: Callable[[], Victim]) -> None:
    """Into somebody's live chain, knowing all of it."""
    for _ in range(count):
        live = victim()
        opening = TransferOpen(version=VERSION, session=live.session, secret=live.secret)
        pages, payload = _pages(attacker, 0, 1)
        data = message_frame(opening) + message_frame(pages, payload)
        # The victim may have ended its session meanwhile.
        await attacker.first("transfer: a victim", data, ("not_donor", "unknown_session"))


async def hostile_donors(attacker: Attacker, count: int) -> None:
    """Donors that were named, and send what cannot be; the session then goes on as it should."""
    done, turn = 0, InTurn(attacker.rng)
    while done < count:
        async with _awaiting(attacker) as session:
            for _ in range(6):
                kind, data, allowed = turn.draw(_transferred(attacker, session))
                async with _transfer(attacker, session) as donor:
                    await donor.send(data)
                    answered = await _answer_of(donor, allowed)
                    attacker.tally.note(f"transferred: {kind}", answered, allowed)
                done += 1
                if kind == "bit flips":
                    # It may have been a valid output, after which others go on.
                    break
            await _goes_on(attacker, session)


async def rival_donors(attacker: Attacker, count: int) -> None:
    """The donor's streams, all at once and cut anywhere: the last one is heard."""
    pages, payload = _pages(attacker, 0, 2)
    whole = message_frame(pages, payload)

    async def hurry(session: HostileSession) -> None:
        async with attacker.wire() as wire:
            cut = truncated(whole * 3, attacker.rng)
            await wire.send(frame(encode_message(_opening(session))) + cut)
            welcome = await wire.receive()
            answer = "closed" if welcome is None else await wire.outcome(may_wait=True)
            attacker.tally.note("rival donor", answer, (HUNG_UP, "closed", "bad_position"))

    async with _awaiting(attacker) as session:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(count):
                tasks.create_task(hurry(session))
        await _goes_on(attacker, session)


async def awaited_donors(attacker: Attacker, count: int) -> None:
    """A session whose donor never comes, of each priority: it waits, and changes nothing."""
    zeros = (0,) * ROWS
    to = Downstream(peer=attacker.facts.peer_id, blocks=attacker.facts.blocks)
    for index in range(count):
        priority = get_args(Priority)[index % len(get_args(Priority))]
        async with _awaiting(attacker, priority=priority) as session:
            for kind, data in (
                ("step", session.step()),
                ("rollback", message_frame(Rollback(epoch=1, lengths=zeros))),
                ("reorder", message_frame(Reorder(epoch=1, sources=zeros))),
                ("hand_over", message_frame(HandOver(to=to))),
            ):
                await session.wire.send(data)
                answer = await session.wire.receive()
                word = describe(answer) if answer is not None else "closed"
                attacker.tally.note(f"before the donor: {kind}", word, ("not_linked",))
            if index % 2:
                await _goes_on(attacker, session)
            else:
                await _closed(session)


async def hostile_reorders(attacker: Attacker, count: int) -> None:
    """Of rows that grow meanwhile, and without end."""
    for _ in range(count):
        async with attacker.session() as session:
            await session.link()
            sources = tuple(attacker.rng.choices(range(ROWS), k=ROWS))
            reorder = message_frame(Reorder(epoch=session.epoch + 1, sources=sources))
            steps = session.steps_in_order(attacker.rng.randint(1, 8))
            await session.wire.send(b"".join(steps) + reorder)
            answer: Any = await session.wire.receive()
            while isinstance(answer, Output):
                answer = await session.wire.receive()
            allowed = ("bad_position", "reordered")
            attacker.tally.note("reorder: under way", describe(answer), allowed)
            reorders = [
                message_frame(Reorder(epoch=session.epoch + 2 + number, sources=sources))
                for number in range(50)
            ]
            await session.wire.send(b"".join(reorders) + frame(encode_message(Close())))
            attacker.tally.note("reorder: many", await session.wire.outcome(), ("closed",))


async def hostile_hand_overs(attacker: Attacker, count: int) -> None:
    """To nobody, to itself, of other blocks, and several at once; steps go on meanwhile."""
    done, turn = 0, InTurn(attacker.rng)
    while done < count:
        async with attacker.session(mode="chain") as session:
            await session.link()
            for _ in range(6):
                kind, data, allowed = turn.draw(_hand_overs(attacker))
                many = 1 + 2 * (kind == "many")
                await session.wire.send(data * many)
                for _ in range(many):
                    answer = await _hand_over_answer(session)
                    attacker.tally.note(f"hand_over: {kind}", answer, allowed)
                    done += 1
                if BAD in allowed:
                    break
                await session.advance()
            else:
                await _closed(session)


async def unwanted_outputs(attacker: Attacker, count: int) -> None:
    """Steps whose outputs nobody wants are answered by nothing but their number."""
    async with attacker.session() as session:
        await session.link()
        for _ in range(min(count, MAX_TOKENS - 1)):
            await session.wire.send(session.step(want="none"))
            answer = await session.wire.receive()
            assert isinstance(answer, Output), f"a step was answered by {answer}"
            assert (answer.step, answer.tensor.shape[0]) == (session.last_step + 1, 0)
            session.lengths[0] += 1
            session.last_step += 1
            attacker.tally.note("want: none", "output", ("output",))
        await _closed(session)


def _opening(session: HostileSession) -> TransferOpen:
    return TransferOpen(version=VERSION, session=session.id, secret=session.secret)


@asynccontextmanager
async def _awaiting(attacker: Attacker, **changes: Any) -> AsyncIterator[HostileSession]:
    """A session that the attacker may fill; unlinked."""
    own = str(attacker.swarm.identity.peer_id)
    async with attacker.session(mode="chain", donor=own, **changes) as session:
        yield session


@asynccontextmanager
async def _transfer(attacker: Attacker, session: HostileSession) -> AsyncIterator[Wire]:
    async with attacker.wire() as wire:
        await wire.send(frame(encode_message(_opening(session))))
        answer = await wire.receive()
        assert isinstance(answer, TransferOpened), f"an honest transfer: {answer}"
        yield wire


async def _answer_of(donor: Wire, allowed: tuple[str, ...]) -> str:
    if allowed == ("synced",):
        answer = await donor.receive()
        return "closed" if answer is None else describe(answer)
    return await donor.outcome(may_wait=HUNG_UP in allowed)


async def _goes_on(attacker: Attacker, session: HostileSession) -> None:
    """A donor that does as it should still can, and the session is what it was given."""
    held = 3
    async with _transfer(attacker, session) as donor:
        lengths = (held, *(0 for _ in range(ROWS - 1)))
        for position in range(held):
            pages, payload = _pages(attacker, position, 1)
            if not position:
                await donor.send(message_frame(Sync(lengths=(0,) * ROWS)))
                assert isinstance(await donor.receive(), Synced)
            await donor.send(message_frame(pages, payload))
        await donor.send(message_frame(Sync(lengths=(held,) * ROWS)))
        answer = await donor.receive()
        assert answer == Synced(lengths=lengths), f"an honest sync was answered by {answer}"
        link = Link(epoch=1, upstream=None, downstream=None, lengths=lengths, emit_from=lengths)
        assert await session.say(link) == Linked(epoch=1)
    session.epoch, session.lengths = 1, list(lengths)
    await session.advance()
    await _closed(session)


async def _closed(session: HostileSession) -> None:
    answer = await session.say(Close())
    assert isinstance(answer, Closed), f"an honest close was answered by {answer}"


async def _hand_over_answer(session: HostileSession) -> str:
    while True:
        answer = await session.wire.receive()
        if answer is None:
            return "closed"
        if isinstance(answer, ErrorMessage | HandedOver):
            return describe(answer)


def _pages(
    attacker: Attacker, position: int, count: int, value: float = 1.0, row: int = 0
) -> tuple[Pages, bytes]:
    facts = attacker.facts
    sides = 2 * (facts.blocks[1] - facts.blocks[0])
    meta, payload = tensors.encode(torch.full((sides, count, *facts.cache_heads), value))
    return Pages(row=row, position=position, tensor=meta), bytes(payload)


def _transferred(attacker: Attacker, session: HostileSession) -> list[Case]:
    rng = attacker.rng
    good, payload = _pages(attacker, 0, 2)
    pages = message_frame(good, payload)
    flipped = bit_flipped(rng.choice([pages, session.step(epoch=0)]), rng)
    return [
        *_bad_pages(attacker),
        *_bad_syncs(),
        *_bad_outputs(attacker, session),
        ("ping", frame(encode_message(Ping(nonce=1))), ("unexpected",)),
        (
            "pong",
            frame(encode_message(Pong(nonce=1, epoch=1, step=1, busy=False))),
            ("unexpected",),
        ),
        ("close", frame(encode_message(Close())), ("unexpected",)),
        ("reorder", message_frame(Reorder(epoch=1, sources=(0,) * ROWS)), ("unexpected",)),
        ("itself", frame(encode_message(_opening(session))), ("unexpected",)),
        ("impossible", impossible(rng), (BAD,)),
        ("truncated", truncated(pages, rng), (HUNG_UP, BAD)),
        ("bit flips", flipped, MUTATED),
    ]


def _bad_pages(attacker: Attacker) -> list[Case]:
    rng = attacker.rng
    good, payload = _pages(attacker, 0, 2)
    sides, count, heads, dim = good.tensor.shape
    beyond, beyond_payload = _pages(attacker, 0, MAX_TOKENS + 1)
    endless, _ = _pages(attacker, 0, 1000)
    nan, nan_payload = _pages(attacker, 0, 2, rng.choice([math.nan, math.inf, -math.inf]))
    huge = rng.choice([(1 << 31, 2), ((1 << 31) - 1,) * 4, (sides, 1 << 24, heads, dim)])

    def shaped(*shape: int, dtype: str = "float32") -> bytes:
        meta = TensorMeta(dtype=dtype, shape=shape)
        size = math.prod(shape) * (2 if dtype == "float16" else 4)
        return message_frame(Pages(row=0, position=0, tensor=meta), bytes(size))

    def told(**tensor: Any) -> bytes:
        described = {"dtype": "float32", "shape": good.tensor.shape, "codec": "none", **tensor}
        return message_frame(good, payload, tensor=described)

    return [
        ("pages: dtype", shaped(sides, count, heads, dim, dtype="float16"), (TEN,)),
        ("pages: dtype", told(dtype=rng.choice(["int64", "", "f" * 400])), (TEN,)),
        ("pages: codec", told(codec="zip"), (TEN,)),
        ("pages: shape", shaped(sides, count, dim, heads), (TEN,)),
        ("pages: shape", shaped(sides // 2, count, heads, dim), (TEN,)),
        ("pages: shape", shaped(sides, count, heads), (TEN,)),
        ("pages: shape", told(shape=(1,) * rng.choice([5, 500])), (TEN,)),
        ("pages: huge shape", told(shape=huge), (TEN,)),
        ("pages: negative shape", told(shape=(-sides, -count, heads, dim)), (TEN,)),
        ("pages: more than fits", message_frame(endless), (TEN,)),
        ("pages: no such row", message_frame(good, payload, row=ROWS), ("bad_rows",)),
        ("pages: no such row", message_frame(good, payload, row=rng.choice([-1, 1 << 40])), (BAD,)),
        ("pages: no such row", message_frame(good, payload, row=MAX_ROWS), (BAD,)),
        ("pages: position", message_frame(good, payload, position=10), ("bad_position",)),
        ("pages: position", message_frame(good, payload, position=1 << 24), ("bad_position",)),
        ("pages: position", message_frame(good, payload, position=-1), (BAD,)),
        ("pages: beyond", message_frame(beyond, beyond_payload), ("bad_position",)),
        ("pages: not finite", message_frame(nan, nan_payload), ("not_finite",)),
        ("pages: too long", message_frame(good, payload + bytes(4)), (BAD,)),
        ("pages: nothing", shaped(sides, 0, heads, dim), (TEN,)),
    ]


def _bad_syncs() -> list[Case]:
    sync = Sync(lengths=(0,) * ROWS)
    return [
        ("sync: rows", message_frame(sync, lengths=()), ("bad_rows",)),
        ("sync: rows", message_frame(sync, lengths=(0,) * (ROWS + 1)), ("bad_rows",)),
        ("sync: rows", message_frame(sync, lengths=(0,) * (MAX_ROWS + 1)), (BAD,)),
        ("sync: negative", message_frame(sync, lengths=(-1,) * ROWS), (BAD,)),
        ("sync: beyond", message_frame(sync, lengths=(1 << 25,) * ROWS), (BAD,)),
        ("sync: beyond", message_frame(sync, lengths=(MOST_TOKENS,) * ROWS), ("synced",)),
        ("sync: nothing", message_frame(sync), ("synced",)),
    ]


def _bad_outputs(attacker: Attacker, session: HostileSession) -> list[Case]:
    """`step`s that the donor says it kept; nothing of them is ever kept here."""
    width = attacker.facts.hidden_size

    def kept(
        *rows: tuple[int, int, int], value: float = 1.0, columns: int = width, dtype: Any = None
    ) -> bytes:
        total = sum(count for *_, count in rows)
        meta, payload = tensors.encode(torch.full((total, columns), value, dtype=dtype))
        step = Step(session=session.id, epoch=0, step=1, rows=(), tensor=meta)
        return message_frame(step, bytes(payload), rows=rows)

    meta, payload = tensors.encode(torch.ones(1, width))
    one = Step(session=session.id, epoch=0, step=1, rows=(), tensor=meta)
    many = ((0, 0, 1),) * (MAX_ROWS + 1)
    return [
        ("kept: no such row", kept((0, 0, 1), (ROWS, 0, 1)), ("bad_rows",)),
        ("kept: no such row", kept((MAX_ROWS, 0, 1)), (BAD,)),
        ("kept: row twice", kept((0, 0, 1), (0, 1, 1)), ("bad_rows",)),
        ("kept: rows", message_frame(one, bytes(payload), rows=many), (BAD,)),
        ("kept: rows", message_frame(one, bytes(payload)), (BAD,)),
        ("kept: position", kept((0, 0, 1), (1, MAX_TOKENS, 1)), ("bad_position",)),
        ("kept: position", kept((0, 1 << 24, 1)), ("bad_position",)),
        ("kept: beyond", kept((0, 0, MAX_TOKENS + 1)), ("bad_position",)),
        ("kept: count", kept((0, 0, 1), (1, 0, 0)), (BAD,)),
        ("kept: shape", kept((0, 0, 2), columns=width + 1), (TEN,)),
        ("kept: dtype", kept((0, 0, 2), dtype=torch.float16), (TEN,)),
        ("kept: not finite", kept((0, 0, 2), value=math.nan), ("not_finite",)),
        ("kept: epoch", session.step(epoch=MAX_EPOCH + 1), (BAD,)),
    ]


def _hand_overs(attacker: Attacker) -> list[Case]:
    rng, facts = attacker.rng, attacker.facts
    start, end = facts.blocks
    good = HandOver(to=Downstream(peer=facts.peer_id, blocks=facts.blocks))
    own = str(attacker.swarm.identity.peer_id)

    def to(peer: object, *blocks: object) -> bytes:
        return message_frame(good, to={"peer": peer, "blocks": blocks})

    other = rng.choice([(start, end + 1), (end, start), (start + 1, end), (0, 1 << 24), (end, end)])
    stranger = rng.choice([own, "nobody", "Q" * 128])
    return [
        ("blocks", to(facts.peer_id, *other), ("bad_link",)),
        ("blocks", to(facts.peer_id, start, rng.choice([-1, 1 << 25])), (BAD, "closed")),
        ("stranger", to(stranger, start, end), LOST),
        ("itself", to(facts.peer_id, start, end), LOST),
        ("nameless", to(rng.choice(["", 7, "\0", "p" * 200]), start, end), (BAD, "closed")),
        ("many", to(stranger, start, end), (*LOST, "unexpected")),
    ]
