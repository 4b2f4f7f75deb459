"""What was sent can be read back as it was, from any position, after any cuts and reorders."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nesa_node.compression import tensors
from nesa_node.swarm.protocol import replay_buffer as outbox_module
from nesa_node.swarm.protocol.messages import RowSlice
from nesa_node.swarm.protocol.replay_buffer import (
    MAX_MERGED_TOKENS,
    ReplayBuffer,
    RowSegment,
    SentStep,
)

HIDDEN = 4
TOKEN_BYTES = 4 * HIDDEN


class Model:
    """The slow obvious outbox: a list of token vectors per row.

    None for the tokens of a prefix, with which a row began and which were not sent here.
    """

    def __init__(self, rows: int, prefixes: Sequence[int] = ()) -> None:
        self.rows: list[list[torch.Tensor | None]] = [[] for _ in range(rows)]
        for row, prefix in zip(self.rows, prefixes, strict=False):
            row += [None] * prefix

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.rows]


def sent_step(outbox: ReplayBuffer, model: Model, step: int, counts: dict[int, int]) -> None:
    rows = tuple(RowSlice(row, len(model.rows[row]), count) for row, count in counts.items())
    hidden_TD = torch.randn(sum(counts.values()), HIDDEN)
    for part, piece in zip(rows, torch.split(hidden_TD, list(counts.values())), strict=True):
        model.rows[part.row].extend(piece)
    meta, payload = tensors.encode(hidden_TD)
    outbox.append(SentStep(step, rows, "all", meta, payload))


def read_back(outbox: ReplayBuffer, start: list[int], until: list[int]) -> list[list[torch.Tensor]]:
    rows: list[list[torch.Tensor]] = [[] for _ in start]
    begun: dict[int, int] = {}
    for held in outbox.iter_steps(start, until):
        kept = asyncio.run(held.materialize())
        pieces = torch.split(kept.decode(), [part.count for part in kept.rows])
        for part, piece in zip(kept.rows, pieces, strict=True):
            assert part.position == begun.setdefault(part.row, part.position) + len(rows[part.row])
            rows[part.row].extend(piece)
    return rows


def kept_bytes(outbox: ReplayBuffer) -> int:
    kept = {part.serial: part.sent for row in outbox._rows for part in row}
    return sum(len(each.payload) for each in kept.values())


def sent_tokens(model: Model) -> int:
    return sum(token is not None for row in model.rows for token in row)


@settings(max_examples=150)
@given(data=st.data())
def test_reading_back_gives_what_a_list_of_tokens_would(data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(1, 3))
    prefixes = [data.draw(st.sampled_from([0, 0, 1, 5])) for _ in range(num_rows)]
    outbox, model = ReplayBuffer(), Model(num_rows, prefixes)
    for step in range(data.draw(st.integers(1, 8))):
        for is_cut in data.draw(st.lists(st.booleans(), max_size=3)):
            if not is_cut:
                sources = [data.draw(st.integers(0, num_rows - 1)) for _ in range(num_rows)]
                outbox.reorder(sources)
                model.rows = [model.rows[source].copy() for source in sources]
                continue
            cut = [data.draw(st.integers(0, length)) for length in model.lengths]
            outbox.truncate(cut)
            model.rows = [row[:n] for row, n in zip(model.rows, cut, strict=True)]
        chosen = data.draw(st.sets(st.integers(0, num_rows - 1), min_size=1))
        counts = {row: data.draw(st.integers(1, 4)) for row in sorted(chosen)}
        sent_step(outbox, model, step, counts)
    start = [data.draw(st.integers(0, length)) for length in model.lengths]
    until = [
        data.draw(st.integers(at, length)) for at, length in zip(start, model.lengths, strict=True)
    ]
    got = read_back(outbox, start, until)
    for row, tokens in enumerate(got):
        want = [token for token in model.rows[row][start[row] : until[row]] if token is not None]
        assert len(tokens) == len(want)
        assert all(torch.equal(a, b) for a, b in zip(tokens, want, strict=True))
    assert 2 * kept_bytes(outbox) <= 3 * sent_tokens(model) * TOKEN_BYTES


def test_an_untouched_step_keeps_its_very_bytes() -> None:
    outbox, model = ReplayBuffer(), Model(1)
    sent_step(outbox, model, 1, {0: MAX_MERGED_TOKENS})
    sent_step(outbox, model, 2, {0: 2})
    until = [MAX_MERGED_TOKENS + 2]
    before = [held.last_step.payload for held in outbox.iter_steps([0], until)]
    outbox.truncate([MAX_MERGED_TOKENS + 1])
    outbox.reorder([0])
    after = [asyncio.run(held.materialize()).payload for held in outbox.iter_steps([0], until)]
    assert after[0] is before[0]
    assert bytes(after[1]) == bytes(before[1])[:TOKEN_BYTES]


def test_neighbouring_steps_of_a_token_come_as_one() -> None:
    outbox, model = ReplayBuffer(), Model(2)
    for number in range(100):
        sent_step(outbox, model, number, {0: 1, 1: 1} if number % 2 else {1: 1})
    steps = [asyncio.run(held.materialize()) for held in outbox.iter_steps([0, 0], model.lengths)]
    assert len(steps) == 3  # of 50 and 100 tokens, at most 64 in one
    assert [step.step for step in steps] == sorted({step.step for step in steps})
    assert steps[-1].step == 99
    for row, tokens in enumerate(read_back(outbox, [0, 0], model.lengths)):
        assert torch.equal(torch.stack(tokens), torch.stack(model.rows[row]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("second", "third"),
    [
        ({"want": "last"}, {"want": "last"}),
        ({"via": ("int8",)}, {"via": ("int8",)}),
        ({"codec": "lossless"}, {}),
        ({"position": 7}, {"position": 8}),
    ],
    ids=["asked for otherwise", "come otherwise", "compressed", "a gap"],
)
def test_steps_that_are_not_alike_do_not(second: dict[str, Any], third: dict[str, Any]) -> None:
    outbox = ReplayBuffer()
    for number, options in enumerate(({}, second, third)):
        at = options.get("position", number)
        meta, payload = tensors.encode(torch.ones(1, 64), codec=options.get("codec", "none"))
        want, via = options.get("want", "all"), options.get("via", ())
        outbox.append(SentStep(number, (RowSlice(0, at, 1),), want, meta, payload, via))
    found = [asyncio.run(held.materialize()) for held in outbox.iter_steps([0], [20])]
    assert len(found) == (3 if "codec" in second else 2)
    assert found[0].rows == (RowSlice(0, 0, 1),)
    if second.get("want") == "last":
        # Of the step that was made of both, the last token only would be too few.
        assert found[1].want == "all"


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done to steps: they are looked at, cut, or their tokens are copied."""
    done: list[str] = []
    places = [
        (outbox_module, "_join_segments"),
        (outbox_module, "_should_copy"),
        (RowSegment, "clip"),
    ]
    for where, name in places:
        original = getattr(where, name)

        def spied(*args: object, name: str = name, original: object = original) -> object:
            done.append(name)
            return original(*args)  # type: ignore[operator]

        monkeypatch.setattr(where, name, spied)
    return done


@pytest.mark.parametrize("sources", [[0, 1], [1, 0], [0, 0]])
def test_thousands_of_reorders_and_steps_look_at_a_few_steps_for_each(
    looked_at: list[str], sources: list[int]
) -> None:
    outbox, model = ReplayBuffer(), Model(2)
    for number in range(1000):
        sent_step(outbox, model, number, {0: 1, 1: 1})
    for number in range(1000, 2000):
        outbox.reorder(sources)
        outbox.truncate([len(model.rows[source]) for source in sources])
        model.rows = [model.rows[source].copy() for source in sources]
        sent_step(outbox, model, number, {0: 1, 1: 1})
    assert len(looked_at) < 10_000
    assert 2 * kept_bytes(outbox) <= 3 * sent_tokens(model) * TOKEN_BYTES
    read = read_back(outbox, [1990, 1990], model.lengths)
    assert all(torch.equal(a, b) for a, b in zip(read[0], model.rows[0][1990:], strict=True))  # type: ignore[arg-type]


def test_a_step_that_is_cut_token_by_token_is_copied_a_few_times(looked_at: list[str]) -> None:
    outbox, model = ReplayBuffer(), Model(1)
    sent_step(outbox, model, 1, {0: 512})
    for length in range(511, 0, -1):
        outbox.truncate([length])
        model.rows[0].pop()
        assert 2 * kept_bytes(outbox) <= 3 * length * TOKEN_BYTES
    assert looked_at.count("_join_segments") < 25


@pytest.mark.parametrize("sources", [None, [1, 0]])
def test_thousands_of_rollbacks_look_at_a_few_steps_for_each(
    looked_at: list[str], sources: list[int] | None
) -> None:
    outbox, model = ReplayBuffer(), Model(2)
    for number in range(2000):
        sent_step(outbox, model, number, {0: 1})
    for _ in range(1000):
        outbox.truncate([len(model.rows[0]) - 1, 0])
        if sources:
            outbox.reorder(sources)
            outbox.reorder(sources)
        model.rows[0].pop()
    sent_step(outbox, model, 2000, {0: 1, 1: 1})
    assert len(looked_at) < 10_000
    assert sent_tokens(model) == 1002
    for row, tokens in enumerate(read_back(outbox, [0, 0], model.lengths)):
        assert torch.equal(torch.stack(tokens), torch.stack(model.rows[row]))  # type: ignore[arg-type]
