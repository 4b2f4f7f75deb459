"""Hostile first messages: what a stream must not begin with."""

from __future__ import annotations

from typing import Any

from nesa_node.swarm.protocol.messages import MAX_EPOCH, MAX_PREFIX_DIGESTS, MAX_ROWS
from tests.hostile.attacker import HUNG_UP, Attacker
from tests.hostile.frames import (
    bit_flipped,
    impossible,
    message_frame,
    open_message,
    recordings,
    spliced,
    truncated,
)

FIRST = ("bad_frame", "unexpected", "version_mismatch", "unknown_session", HUNG_UP)
OPENING = (*FIRST, "wrong_model", "wrong_blocks", "context_length", "too_large", "not_a_member")
MUTATED = (*OPENING, "busy", "opened", "bad_tensor")


async def random_first_bytes(attacker: Attacker, count: int) -> None:
    rng = attacker.rng
    for _ in range(count):
        await attacker.first("random bytes", rng.randbytes(rng.randint(1, 600)), FIRST)


async def impossible_first_frames(attacker: Attacker, count: int) -> None:
    for _ in range(count):
        await attacker.first("impossible frame", impossible(attacker.rng), ("bad_frame",))


async def mutated_recordings(attacker: Attacker, count: int) -> None:
    """Every type of message as the first of a stream: whole, cut, flipped and spliced."""
    rng = attacker.rng
    for index in range(count):
        known = recordings(attacker.facts, rng)
        data = known[index % len(known)]
        kind, data = rng.choice(
            [
                ("recording", data),
                ("truncated", truncated(data, rng)),
                ("bit flips", bit_flipped(data, rng)),
                ("bit flips", bit_flipped(data, rng)),
                ("spliced", spliced(data, rng.choice(known), rng)),
            ]
        )
        await attacker.first(kind, data, MUTATED)


async def impossible_opens(attacker: Attacker, count: int) -> None:
    rng, facts = attacker.rng, attacker.facts
    start, end = facts.blocks
    for _ in range(count):
        choices: list[tuple[str, dict[str, Any], str]] = [
            ("version", {"version": (9, 0)}, "version_mismatch"),
            ("version", {"version": (-1, 0)}, "bad_frame"),
            ("model", {"model": "\x1b[2J\nTraceback (most recent call last)"}, "wrong_model"),
            ("model", {"model": "m" * 300}, "bad_frame"),
            ("session", {"session": rng.randbytes(rng.choice([0, 15, 17]))}, "bad_frame"),
            ("secret", {"secret": b""}, "bad_frame"),
            ("blocks", {"blocks": (end, start)}, "wrong_blocks"),
            ("blocks", {"blocks": (start, end + 1)}, "wrong_blocks"),
            ("blocks", {"blocks": (start, start)}, "wrong_blocks"),
            ("blocks", {"blocks": (start, 1 << 30)}, "bad_frame"),
            ("rows", {"rows": rng.choice([0, -1, MAX_ROWS + 1, 1 << 40])}, "bad_frame"),
            ("tokens", {"max_tokens": rng.choice([0, -5, 1 << 25, 1 << 63])}, "bad_frame"),
            ("tokens", {"max_tokens": 1 << 24}, "context_length"),
            ("tokens", {"max_tokens": 1000, "rows": MAX_ROWS}, "too_large"),
            ("mode", {"mode": "ring"}, "bad_frame"),
            ("dtype", {"dtype": "int8"}, "bad_frame"),
            ("epoch", {"epoch": rng.choice([-1, MAX_EPOCH + 1, 1 << 63])}, "bad_frame"),
            ("upstream", {"upstream": "u" * 200}, "bad_frame"),
            ("membership", {"membership": bytes(64)}, "not_a_member"),
            ("membership", {"membership": bytes(65)}, "bad_frame"),
            ("prefix", {"prefix": [[rng.randbytes(rng.choice([0, 15, 17]))]]}, "bad_frame"),
            ("prefix", {"prefix": [[]] * (MAX_ROWS + 1)}, "bad_frame"),
            ("prefix", {"rows": 2, "prefix": [[], [], []]}, "bad_prefix"),
            ("prefix", {"prefix": [[bytes(16)] * (MAX_PREFIX_DIGESTS + 1)]}, "bad_prefix"),
        ]
        kind, changes, allowed = rng.choice(choices)
        data = message_frame(open_message(facts, rng), **changes)
        await attacker.first(f"open: {kind}", data, (allowed,))
