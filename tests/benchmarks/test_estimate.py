from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks import estimate


def test_every_case_is_measured_with_every_method() -> None:
    options = replace(estimate.QUICK, nodes=(20,))
    first, *_ = estimate.cases(options)
    rows = estimate.measure(first, 0.4, options)
    assert {row["method"] for row in rows} == {*estimate.METHODS, "rates"}
    assert all(0 <= row["median_error"] <= row["p90_error"] for row in rows)


def test_matrix_of_slices_is_read_without_its_zeros(tmp_path: Path) -> None:
    seconds = np.full((3, 4, 4), 0.05)
    seconds[0] = 0.0
    seconds[:, 0, 1] = 0.0
    seconds[:, 2, 3] = seconds[:, 3, 2] = 0.0
    path = tmp_path / "matrix.npz"
    np.savez(path, rtt_s=seconds)
    case = estimate.read_matrix(str(path))
    assert case.rtt_ms_NN[0, 1] == 50.0
    assert np.isnan(case.rtt_ms_NN[2, 3])
    assert case.rate_NN is None
