from __future__ import annotations

import pytest

from benchmarks.options import Options
from benchmarks.wan.auto import AUTO, DEFAULTS, FIXED, compare, show
from benchmarks.wan.cells import CODECS


def runs(*seconds: tuple[float, float, float]) -> list[dict[str, float]]:
    return [{"none": none, "int8": int8, AUTO: chosen} for none, int8, chosen in seconds]


def test_choice_is_compared_with_the_best_codec_of_all_runs() -> None:
    row = compare(runs((1.0, 2.0, 1.04), (1.0, 2.0, 1.04), (1.0, 0.5, 1.04)))
    assert row["best"] == "none"
    assert row["ratio"] == pytest.approx(1.04)
    assert row["near"]


def test_choice_that_is_too_slow_is_not_near() -> None:
    assert not compare(runs((1.0, 2.0, 1.06), (1.0, 2.0, 1.06), (1.0, 2.0, 1.06)))["near"]


def test_choice_within_the_noise_of_the_run_is_near() -> None:
    noisy = runs((0.8, 1.6, 0.9), (1.0, 2.0, 1.2), (1.3, 2.6, 1.5))
    row = compare(noisy)
    assert row["ratio"] == pytest.approx(1.2)
    assert row["deviation_s"] == pytest.approx(0.3)
    assert row["near"]


def test_default_grid_is_four_bandwidths_and_three_prompts_of_every_codec(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (len(DEFAULTS.bandwidths_mbit), len(DEFAULTS.prompts)) == (4, 3)
    assert {*FIXED, AUTO} <= CODECS.keys()
    row = compare(runs((1.0, 0.7, 1.0)))
    about = {"bandwidth_mbit_per_s": 5, "reached_mbit_per_s": 4.9, "prompt_tokens": 32}
    show([row | about], Options(codecs=("none", "int8", AUTO)))
    assert "NO" in capsys.readouterr().out
