"""Cutting a step loses nothing, repeats nothing, and asks for exactly what the step asked for."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nesa_node.client.session.base import RowSlice, Want
from nesa_node.client.session.step_pipeline import MAX_CHUNK_TOKENS, MIN_CHUNK_TOKENS, split_step

COUNTS = st.lists(st.integers(1, 1500), min_size=1, max_size=40)


def slices(counts: list[int]) -> list[RowSlice]:
    return [RowSlice(row, 10 * row, count) for row, count in enumerate(counts)]


def tokens(rows: tuple[RowSlice, ...] | list[RowSlice]) -> list[tuple[int, int]]:
    return [(part.row, part.position + i) for part in rows for i in range(part.count)]


@given(COUNTS, st.integers(1, 12))
def test_chunks_hold_every_token_once_and_in_order(counts: list[int], hops: int) -> None:
    chunks = split_step(slices(counts), "all", hops)
    assert tokens([part for chunk in chunks for part in chunk.rows]) == tokens(slices(counts))
    assert chunks[0].start == 0
    assert all(a.end == b.start for a, b in itertools.pairwise(chunks))
    for chunk in chunks:
        assert chunk.end - chunk.start == sum(part.count for part in chunk.rows)
        assert len({part.row for part in chunk.rows}) == len(chunk.rows)


@given(COUNTS, st.integers(1, 12))
def test_chunks_are_of_nearly_equal_size_and_none_is_large(counts: list[int], hops: int) -> None:
    sizes = [chunk.end - chunk.start for chunk in split_step(slices(counts), "all", hops)]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= max(MAX_CHUNK_TOKENS, len(counts))


@given(COUNTS, st.integers(1, 12), st.sampled_from(["all", "last", "none"]))
def test_outputs_of_chunks_join_to_what_the_step_asked_for(
    counts: list[int], hops: int, want: Want
) -> None:
    hidden_TD = torch.arange(sum(counts)).unsqueeze(1)
    outputs = []
    for chunk in split_step(slices(counts), want, hops):
        ends = torch.tensor([part.count for part in chunk.rows]).cumsum(0) - 1
        output_TD = hidden_TD[chunk.start : chunk.end]
        if chunk.want != "all":
            output_TD = output_TD[ends] if chunk.want == "last" else output_TD[:0]
        outputs.append(chunk.select_output(output_TD))
    ends = torch.tensor(counts).cumsum(0) - 1
    expected = {"all": hidden_TD, "last": hidden_TD[ends], "none": hidden_TD[:0]}
    assert torch.equal(torch.cat(outputs), expected[want])


@pytest.mark.parametrize("counts", [[MIN_CHUNK_TOKENS], [1] * 256, [1], [100, 28]])
def test_short_steps_and_decode_steps_stay_whole(counts: list[int]) -> None:
    (chunk,) = split_step(slices(counts), "last", 3)
    assert list(chunk.rows) == slices(counts)
    assert chunk.want == "last"


@pytest.mark.parametrize("total", [2000, 4000, 8000, 100_000])
@pytest.mark.parametrize("hops", [2, 3, 6])
def test_long_prefills_keep_all_hops_at_work(total: int, hops: int) -> None:
    chunks = split_step(slices([total]), "last", hops)
    bubbles = (hops - 1) / (len(chunks) + hops - 1)
    assert (
        bubbles < 0.08 or chunks[0].end == MIN_CHUNK_TOKENS or total < hops * 12 * MIN_CHUNK_TOKENS
    )


def test_only_the_chunk_in_which_a_row_ends_is_asked_for_it() -> None:
    chunks = split_step(slices([300, 10, 200]), "last", 3)
    wants = [
        (chunk.want, [part.row for part in chunk.rows], chunk.ends_within_row) for chunk in chunks
    ]
    assert wants == [
        ("none", [0], True),
        ("none", [0], True),
        ("last", [0, 1, 2], True),
        ("last", [2], False),
    ]
