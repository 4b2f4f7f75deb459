"""Merging and cutting steps changes where tokens run, never which or in what order."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nesa_node.server.batch import MAX_JOB_TOKENS, Batch
from nesa_node.swarm.messages import RowSlice


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_every_token_runs_once_and_comes_back_to_its_step(data: st.DataObject) -> None:
    lengths = [data.draw(st.integers(0, 50)) for _ in range(data.draw(st.integers(1, 3)))]
    starts = list(lengths)
    steps = []
    for _ in range(data.draw(st.integers(1, 6))):
        chosen = sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1)))
        rows = []
        for row in chosen:
            count = data.draw(st.integers(1, 300))
            rows.append(RowSlice(row, lengths[row], count))
            lengths[row] += count
        marks = [
            torch.tensor([[float(p.row), float(p.position + i)] for i in range(p.count)])
            for p in rows
        ]
        steps.append((tuple(rows), torch.cat(marks)))
    batch = Batch(steps)
    seen: list[list[int]] = [[] for _ in lengths]
    for job in batch.jobs:
        assert 0 < sum(len(chunk.hidden_LD) for chunk in job) <= MAX_JOB_TOKENS
        for chunk in job:
            assert bool((chunk.hidden_LD[:, 0] == chunk.row).all())
            seen[chunk.row].extend(int(p) for p in chunk.hidden_LD[:, 1])
        batch.done(job, [chunk.hidden_LD * 2 for chunk in job])
    for row, positions in enumerate(seen):
        assert positions == list(range(starts[row], lengths[row]))
    for (_, hidden_TD), output_TD in zip(steps, batch.results(), strict=True):
        assert torch.equal(output_TD, hidden_TD * 2)
