"""Texts of a micro-batch, packed and in rows.

T tokens, R rows, L columns, D hidden.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nesa_node.core.errors import ProtocolError
from nesa_node.engine.training.text_layout import TextLayout

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@given(LENGTHS)
def test_rows_and_packed_tokens_are_the_same(lengths: list[int]) -> None:
    layout = TextLayout(tuple((length,) for length in lengths))
    packed_TD = torch.randn(sum(lengths), 3)
    rows_RLD = layout.to_rows(packed_TD)
    assert rows_RLD.shape == (len(lengths), max(lengths), 3)
    assert torch.equal(layout.from_rows(rows_RLD), packed_TD)
    assert layout.is_padded == (len(set(lengths)) > 1)
    batch = layout.make_batch(7)
    mask_RL = torch.ones(rows_RLD.shape[:2]) if batch.mask_RL is None else batch.mask_RL
    assert mask_RL.sum(1).tolist() == lengths
    assert not rows_RLD[mask_RL == 0].any()
    assert batch.positions_RL is None


@given(LENGTHS)
def test_each_text_of_a_row_begins_at_position_0(lengths: list[int]) -> None:
    layout = TextLayout((tuple(lengths),))
    batch = layout.make_batch(7)
    assert batch.mask_RL is None
    if len(lengths) > 1:
        assert batch.positions_RL is not None
        expected = [position for length in lengths for position in range(length)]
        assert batch.positions_RL.tolist() == [expected]
    packed_TD = torch.randn(sum(lengths), 3)
    assert torch.equal(layout.to_rows(packed_TD)[0], packed_TD)


def test_several_rows_of_several_texts_are_refused() -> None:
    with pytest.raises(ProtocolError, match="only where it is the only one"):
        TextLayout(((1, 2), (3,)))
