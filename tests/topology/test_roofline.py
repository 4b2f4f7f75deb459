from __future__ import annotations

import pytest

from nesa_node.topology.roofline import BlockWork, WeightFigures, predict_speed

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
