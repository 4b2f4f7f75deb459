"""What was sent can be read back as it was, from any position, after any cuts and reorders."""

import asyncio
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nesa_node.compression import tensors
from nesa_node.swarm import outbox as outbox_module
from nesa_node.swarm.messages import RowSlice
from nesa_node.swarm.outbox import Held, Kept, Outbox

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


def sent_step(outbox: Outbox, model: Model, step: int, counts: dict[int, int]) -> None:
    rows = tuple(RowSlice(row, len(model.rows[row]), count) for row, count in counts.items())
    hidden_TD = torch.randn(sum(counts.values()), HIDDEN)
    for part, piece in zip(rows, torch.split(hidden_TD, list(counts.values())), strict=True):
        model.rows[part.row].extend(piece)
    meta, payload = tensors.encode(hidden_TD)
    outbox.append(Kept(step, rows, "all", meta, payload))


def read_back(outbox: Outbox, start: list[int], until: list[int]) -> list[list[torch.Tensor]]:
    rows: list[list[torch.Tensor]] = [[] for _ in start]
    begun: dict[int, int] = {}
    for held in outbox.since(start, until):
        kept = asyncio.run(held.copied())
        pieces = torch.split(kept.tensor(), [part.count for part in kept.rows])
        for part, piece in zip(kept.rows, pieces, strict=True):
            assert part.position == begun.setdefault(part.row, part.position) + len(rows[part.row])
            rows[part.row].extend(piece)
    return rows


def kept_bytes(outbox: Outbox, model: Model) -> int:
    whole = outbox.since([0] * len(model.rows), model.lengths)
    return sum(len(held.kept.payload) for held in whole)


def sent_tokens(model: Model) -> int:
    return sum(token is not None for row in model.rows for token in row)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_reading_back_gives_what_a_list_of_tokens_would(data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(1, 3))
    prefixes = [data.draw(st.sampled_from([0, 0, 1, 5])) for _ in range(num_rows)]
    outbox, model = Outbox(), Model(num_rows, prefixes)
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
    assert 3 * kept_bytes(outbox, model) <= 4 * sent_tokens(model) * TOKEN_BYTES


def test_an_untouched_step_keeps_its_very_bytes() -> None:
    outbox, model = Outbox(), Model(1)
    sent_step(outbox, model, 1, {0: 3})
    sent_step(outbox, model, 2, {0: 2})
    before = [held.kept.payload for held in outbox.since([0], [5])]
    outbox.truncate([4])
    outbox.reorder([0])
    after = [asyncio.run(held.copied()).payload for held in outbox.since([0], [4])]
    assert after[0] is before[0]
    assert bytes(after[1]) == bytes(before[1])[:TOKEN_BYTES]
    model.rows[0].pop()
    assert kept_bytes(outbox, model) == 4 * TOKEN_BYTES


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done to steps: their tokens are copied, or found in another order or range."""
    done: list[str] = []
    for where, name in ((outbox_module, "_picked"), (Held, "reordered"), (Held, "within")):
        original = getattr(where, name)

        def spied(*args: object, name: str = name, original: object = original) -> object:
            done.append(name)
            return original(*args)  # type: ignore[operator]

        monkeypatch.setattr(where, name, spied)
    return done


@pytest.mark.parametrize("sources", [[0, 1], [1, 0], [0, 0]])
def test_thousands_of_reorders_copy_nothing_and_look_at_each_step_once(
    looked_at: list[str], sources: list[int]
) -> None:
    outbox, model = Outbox(), Model(2)
    for number in range(100):
        sent_step(outbox, model, number, {0: 1, 1: 1})
    for _ in range(1701):
        outbox.reorder(sources)
        outbox.truncate(model.lengths)
    assert not looked_at
    list(outbox.since([0, 0], [50, 50]))
    assert looked_at.count("reordered") <= 100
    # Of each step with two rows one copy of the one that is left, if there is one.
    assert looked_at.count("_picked") == (100 if sources == [0, 0] else 0)


def test_a_step_that_is_cut_token_by_token_is_copied_a_few_times(looked_at: list[str]) -> None:
    outbox, model = Outbox(), Model(1)
    sent_step(outbox, model, 1, {0: 512})
    for length in range(511, 0, -1):
        outbox.truncate([length])
        model.rows[0].pop()
        assert 3 * kept_bytes(outbox, model) <= 4 * length * TOKEN_BYTES
    assert looked_at.count("_picked") < 25


@pytest.mark.parametrize("sources", [None, [1, 0]])
def test_thousands_of_rollbacks_look_at_each_step_that_they_cut_once(
    looked_at: list[str], sources: list[int] | None
) -> None:
    outbox, model = Outbox(), Model(2)
    for number in range(2000):
        sent_step(outbox, model, number, {0: 1})
    for _ in range(1000):
        outbox.truncate([len(model.rows[0]) - 1, 0])
        if sources:
            outbox.reorder(sources)
            outbox.reorder(sources)
        model.rows[0].pop()
    sent_step(outbox, model, 2000, {0: 1, 1: 1})
    assert looked_at.count("within") == 1000
    assert len(list(outbox.since([0, 0], [2000, 2000]))) == 1001
