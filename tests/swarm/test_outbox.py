"""What was sent can be read back as it was, from any position, after any cuts."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nesa_node.compression import tensors
from nesa_node.swarm.messages import RowSlice
from nesa_node.swarm.outbox import Kept, Outbox

HIDDEN = 4


class Model:
    """The slow obvious outbox: a list of token vectors per row."""

    def __init__(self, rows: int) -> None:
        self.rows: list[list[torch.Tensor]] = [[] for _ in range(rows)]

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
    for kept in outbox.since(start, until):
        pieces = torch.split(kept.tensor(), [part.count for part in kept.rows])
        for part, piece in zip(kept.rows, pieces, strict=True):
            assert part.position == start[part.row] + len(rows[part.row])
            rows[part.row].extend(piece)
    return rows


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_reading_back_gives_what_a_list_of_tokens_would(data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(1, 3))
    outbox, model = Outbox(), Model(num_rows)
    for step in range(data.draw(st.integers(1, 8))):
        if data.draw(st.booleans()):
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
        want = model.rows[row][start[row] : until[row]]
        assert len(tokens) == len(want)
        assert all(torch.equal(a, b) for a, b in zip(tokens, want, strict=True))


def test_an_untouched_step_keeps_its_very_bytes() -> None:
    outbox, model = Outbox(), Model(1)
    sent_step(outbox, model, 1, {0: 3})
    sent_step(outbox, model, 2, {0: 2})
    before = [kept.payload for kept in outbox.since([0], [5])]
    outbox.truncate([4])
    after = [kept.payload for kept in outbox.since([0], [4])]
    assert after[0] is before[0]
    assert bytes(after[1]) == bytes(before[1])[: HIDDEN * 4]
    assert outbox.nbytes == 4 * HIDDEN * 4
