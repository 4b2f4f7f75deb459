from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nesa_node.core.ids import PeerId, Span
from nesa_node.topology.roofline import (
    PACKED_BYTES,
    BlockWork,
    Roofline,
    WeightFigures,
    pack_roofline,
    predict_speed,
    unpack_roofline,
)
from nesa_node.topology.snapshot import NodeState

WORK = BlockWork(read_bytes=2e7, flop=2e7)


def test_a_decode_step_reads_all_weights_and_pays_each_block() -> None:
    figures = WeightFigures(block_overhead_s=1e-3, read_bytes_per_s=1e10, flop_per_s=1e12)
    speed = predict_speed([WORK] * 4, figures)
    assert speed.decode_tokens_per_s == pytest.approx(1 / (4 * (1e-3 + 2e-3)))


def test_a_gpu_computes_while_the_next_block_is_launched() -> None:
    figures = WeightFigures(1e-3, 1e12, 1e14, overlaps=True)
    assert predict_speed([WORK], figures).decode_tokens_per_s == pytest.approx(1e3)
    slow = WeightFigures(1e-3, 1e10, 1e14, overlaps=True)
    assert predict_speed([WORK], slow).decode_tokens_per_s == pytest.approx(500)


@pytest.mark.parametrize(
    ("chunk_tokens", "seconds"),
    [pytest.param(1, 2e-3, id="reading weights"), pytest.param(1000, 20e-3, id="arithmetic")],
)
def test_a_prefill_takes_the_longer_of_both(chunk_tokens: int, seconds: float) -> None:
    figures = WeightFigures(0.0, 1e10, 1e12)
    speed = predict_speed([WORK], figures, chunk_tokens)
    assert speed.prefill_tokens_per_s == pytest.approx(chunk_tokens / seconds)


RATES = st.floats(1e-3, 9e17)
ROOFLINES = st.builds(
    Roofline,
    st.builds(WeightFigures, st.just(0.0) | st.floats(1e-7, 900), RATES, RATES, st.booleans()),
    st.builds(BlockWork, RATES, RATES),
)


def _numbers(roofline: Roofline) -> tuple[float, ...]:
    figures, work = roofline.figures, roofline.work
    return (
        *(figures.block_overhead_s, figures.read_bytes_per_s, figures.flop_per_s),
        *(work.read_bytes, work.flop),
    )


@given(ROOFLINES)
def test_figures_come_back_from_eleven_bytes(roofline: Roofline) -> None:
    packed = pack_roofline(roofline)
    back = unpack_roofline(packed)
    assert len(packed) == PACKED_BYTES == 11
    assert back is not None
    assert _numbers(back) == pytest.approx(_numbers(roofline), rel=0.004)
    assert back.figures.overlaps == roofline.figures.overlaps
    assert pack_roofline(back) == packed


def test_no_figures_take_no_bytes() -> None:
    assert pack_roofline(None) == b""
    assert unpack_roofline(b"") is None


def _packed(*values: float, last: int = 0) -> bytes:
    return b"".join(struct.pack(">f", each)[:2] for each in values) + bytes([last])


@pytest.mark.parametrize(
    "packed",
    [
        _packed(0.0, 1.0, 1.0, 1.0, 1.0)[:-1],
        _packed(0.0, 1.0, 1.0, 1.0, 1.0) + b"\0",
        _packed(0.0, 1.0, 1.0, 1.0, 1.0, last=2),
        _packed(-1.0, 1.0, 1.0, 1.0, 1.0),
        _packed(2e3, 1.0, 1.0, 1.0, 1.0),
        _packed(float("nan"), 1.0, 1.0, 1.0, 1.0),
        _packed(0.0, 0.0, 1.0, 1.0, 1.0),
        _packed(0.0, 1.0, float("inf"), 1.0, 1.0),
        _packed(0.0, 1.0, 1.0, -1.0, 1.0),
        _packed(0.0, 1.0, 1.0, 1.0, 2e18),
    ],
)
def test_what_are_no_figures_is_refused(packed: bytes) -> None:
    assert unpack_roofline(_packed(0.0, 1.0, 1.0, 1.0, 1.0)) is not None
    with pytest.raises(ValueError, match="figures"):
        unpack_roofline(packed)


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_roofline_corrected_by_one_span_says_of_others_what_equal_blocks_say(
    overlaps: bool,
) -> None:
    """So a node that has measured one span needs no roofline for another."""
    roofline = Roofline(WeightFigures(1e-3, 1e10, 1e12, overlaps), WORK)
    node = NodeState(PeerId("a"), Span(0, 8), decode_tokens_per_s=30.0, prefill_tokens_per_s=70.0)
    moved = node.with_span(Span(3, 6))
    before, after = roofline.predict(8), roofline.predict(3)
    assert moved.decode_tokens_per_s == pytest.approx(
        30.0 / before.decode_tokens_per_s * after.decode_tokens_per_s
    )
    assert moved.prefill_tokens_per_s == pytest.approx(
        70.0 / before.prefill_tokens_per_s * after.prefill_tokens_per_s
    )
