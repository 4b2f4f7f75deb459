"""Padded batches are sent without padding and come back where they belong; layers as one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nesa_node.client.model.layers import LayeredSession, pack
from nesa_node.client.session.base import NoisyVectors
from nesa_node.core.settings.noise_spec import NoiseSpec
from nesa_node.privacy.noise.gaussian_mechanism import compose_epsilon
from tests.client.test_lifecycle import ScriptedSession

WIDTH = 3


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor | None, list[int] | None]:
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    ids_BL = torch.arange(1, rows * columns + 1).view(rows, columns)
    bits = st.lists(st.integers(0, 1), min_size=columns, max_size=columns)
    mask = draw(st.none() | st.lists(bits, min_size=rows, max_size=rows))
    skips = st.lists(st.integers(0, columns), min_size=rows, max_size=rows)
    return ids_BL, None if mask is None else torch.tensor(mask), draw(st.none() | skips)


def expected(
    ids_BL: torch.Tensor, mask_BL: torch.Tensor | None, skip: list[int] | None
) -> list[list[int]]:
    """Which columns each row sends, token by token."""
    sent = []
    for row in range(ids_BL.shape[0]):
        columns = [c for c in range(ids_BL.shape[1]) if mask_BL is None or mask_BL[row, c]]
        sent.append(columns[skip[row] if skip else 0 :])
    return sent


@given(batches(), st.integers(0, 7))
def test_packing_and_unpacking_agree_with_a_loop_over_tokens(
    batch: tuple[torch.Tensor, torch.Tensor | None, list[int] | None], keep: int
) -> None:
    ids_BL, mask_BL, skip = batch
    rows, columns = ids_BL.shape
    packed = pack(ids_BL, mask_BL, skip)
    sent = expected(ids_BL, mask_BL, skip)
    assert [ids.tolist() for ids in packed.row_ids] == [
        ids_BL[row, sent[row]].tolist() for row in range(rows)
    ]

    want = packed.choose_want(keep)
    parts = [ids[-1:] if want == "last" else ids for ids in packed.row_ids]
    # Each hidden state says which token it is of, so that a wrong place shows.
    hidden_TD = torch.cat(parts).float().unsqueeze(1).expand(-1, WIDTH)
    logits_BKV = packed.logits(hidden_TD, want, keep, lambda hidden: 10 * hidden)
    kept = list(range(columns))[-keep if keep else None :]
    assert logits_BKV.shape == (rows, len(kept), WIDTH)
    for row in range(rows):
        for place, column in enumerate(kept):
            value = 10.0 * float(ids_BL[row, column]) if column in sent[row] else 0.0
            assert logits_BKV[row, place].tolist() == [value] * WIDTH


@given(batches(), st.lists(st.integers(0, 100), max_size=5))
def test_kept_columns_may_be_named(
    batch: tuple[torch.Tensor, torch.Tensor | None, list[int] | None], chosen: list[int]
) -> None:
    ids_BL, mask_BL, skip = batch
    packed = pack(ids_BL, mask_BL, skip)
    indices = torch.tensor([index % ids_BL.shape[1] for index in chosen], dtype=torch.long)
    hidden_TD = torch.cat(list(packed.row_ids)).float().unsqueeze(1)
    everything = packed.logits(hidden_TD, "all", 0, lambda hidden: hidden)
    named = packed.logits(hidden_TD, packed.choose_want(indices), indices, lambda hidden: hidden)
    assert torch.equal(named, everything[:, indices])


class NoisyLayer(ScriptedSession):
    """A layer that has sent `count` vectors with noise; None: without noise."""

    def __init__(self, noise: NoiseSpec, count: int | None) -> None:
        super().__init__(1, 8, lambda: None)
        self._sent = None if count is None else NoisyVectors(noise, count)

    @property
    def noisy_vectors(self) -> NoisyVectors | None:
        return self._sent


def test_noise_of_several_layers_is_composed_once() -> None:
    """Their epsilons' sum would be larger, and of as many deltas as there are layers."""
    noise = NoiseSpec(2.0, 1e-5, 3.0)
    layered = LayeredSession([NoisyLayer(noise, count) for count in (30, None, 34)])
    assert layered.noisy_vectors is not None
    assert layered.noisy_vectors.epsilon == pytest.approx(compose_epsilon(2.0, 1e-5, 64))
    apart = compose_epsilon(2.0, 1e-5, 30) + compose_epsilon(2.0, 1e-5, 34)
    assert layered.noisy_vectors.epsilon < apart
    assert LayeredSession([NoisyLayer(noise, None)]).noisy_vectors is None
