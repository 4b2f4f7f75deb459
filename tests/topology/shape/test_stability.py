import numpy as np
import pytest

from nesa_node.topology.shape.stability import height_deviation, stability_scores

NAN = np.nan


def test_a_height_that_jumps_about_lowers_the_score() -> None:
    height_TN = np.full((20, 6), 0.1)
    height_TN[::2, 1] = 0.12
    height_TN[::4, 2] = 0.4
    score = stability_scores(height_TN)
    assert score[0] == score[5] == 1.0
    assert score[0] > score[1] > score[2] > 0.0


def test_half_off_halves_the_score_and_units_do_not_matter() -> None:
    # Median 1, a quarter of the heights are 3: the mean distance is 0.5.
    height_TN = np.array([[1.0, 9.0, 9.0]] * 6 + [[3.0, 9.0, 9.0]] * 2)
    assert height_deviation(height_TN)[0] == pytest.approx(0.5)
    assert stability_scores(height_TN)[0] == pytest.approx(0.5)
    assert stability_scores(1000 * height_TN)[0] == pytest.approx(0.5)


def test_far_but_steady_is_stable() -> None:
    height_TN = np.tile([0.01, 0.5], (10, 1))
    assert stability_scores(height_TN).tolist() == [1.0, 1.0]


def test_what_all_do_is_no_nodes_own() -> None:
    height_TN = np.tile(np.linspace(1.0, 3.0, 10)[:, None], (1, 5))
    assert stability_scores(height_TN).tolist() == pytest.approx([1.0] * 5)


def test_young_nodes_are_neither_praised_nor_blamed() -> None:
    height_TN = np.full((10, 4), NAN)
    height_TN[:, 0] = height_TN[:, 3] = 1.0
    height_TN[:, 1] = [1.0, 3.0] * 5
    height_TN[7:, 2] = 9.0
    score = stability_scores(height_TN)
    assert np.isnan(height_deviation(height_TN)[2])
    assert score[2] == pytest.approx(np.median(score[[0, 1, 3]]))
    assert stability_scores(np.full((3, 2), 1.0)).tolist() == [1.0, 1.0]


def test_alone_a_node_is_stable() -> None:
    assert stability_scores(np.zeros((10, 1))).tolist() == [1.0]


def test_tolerance_must_be_positive() -> None:
    with pytest.raises(ValueError, match="tolerance"):
        stability_scores(np.ones((5, 1)), tolerance=0.0)
