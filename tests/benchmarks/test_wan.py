from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from benchmarks.__main__ import make_parser
from benchmarks.options import Options
from benchmarks.wan import cells
from benchmarks.wan.bench import QUICK, WARM_UP_STEPS, compare, show, summarize
from benchmarks.wan.cells import Cell, Chain, Codec, grid

CHAIN = Chain(nodes=3, hidden_size=500, value_bits=32)
CELL = Cell(round_trip_ms=50, bandwidth_mbit_per_s=10, batch=4, codec="none")


def generation(*gaps_s: float, token: int = 1) -> dict[str, Any]:
    warm_up = [9.0] * WARM_UP_STEPS
    return {
        "gaps_s": [*warm_up, *gaps_s],
        "tokens": [token],
        "first_token_s": 2.0,
        "wire_bytes": 77,
    }


def test_bound_is_compute_and_latency_and_transfer_on_each_leg_of_the_chain() -> None:
    # Four legs: 25 ms each, and 4 rows x 500 values x 4 bytes at 1.25 MB/s each.
    assert CHAIN.bound_s(CELL, 0.030) == pytest.approx(0.030 + 4 * 0.025 + 4 * 0.0064)


def test_codec_counts_by_the_bits_of_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "CODECS", {"none": Codec(), "int8": Codec(8)})
    assert CHAIN.leg_bytes(CELL) == 8000
    assert CHAIN.leg_bytes(Cell(50, 10, 4, "int8")) == 2000


def test_grid_has_every_combination_and_changes_links_as_seldom_as_it_can() -> None:
    options = Options(round_trips_ms=(0, 50), bandwidths_mbit=(100, 10), batches=(1, 8))
    found = grid(options)
    assert len(set(found)) == len(found) == 8
    links = [cell.link for cell in found]
    assert sum(a != b for a, b in pairwise(links)) == 3
    assert len(grid(Options())) == 45
    assert len(grid(QUICK)) == 2


def test_link_of_a_cell_takes_half_of_the_round_trip_each_way() -> None:
    assert CELL.link.latency_ms == 25
    assert CELL.link.bandwidth_mbit_per_s == 10


def test_run_is_compared_with_its_own_compute() -> None:
    alone, near = generation(0.02, 0.02, 0.02), generation(0.03, 0.03, 0.09)
    one = compare(CHAIN, CELL, alone, near, generation(0.2, 0.2, 0.5))
    assert one["physical_bound_s"] == pytest.approx(0.1456)
    assert one["physical_ratio"] == pytest.approx(0.2 / 0.1456)
    assert one["compute_s"] == 0.03
    assert one["bound_s"] == pytest.approx(0.1556)
    assert one["ratio"] == pytest.approx(0.2 / 0.1556)
    assert one["mean_ratio"] == pytest.approx(0.3 / 0.1756)
    assert one["tokens_equal"]


def test_row_is_the_median_of_its_runs_and_keeps_them_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    near, alone = generation(0.03, 0.03), generation(0.02, 0.02)
    steps = (0.2, 0.5, 0.3)
    runs = [compare(CHAIN, CELL, alone, near, generation(step, step)) for step in steps]
    row = summarize(CHAIN, CELL, runs)
    assert row["step_s"] == 0.3
    assert row["tokens_per_s"] == pytest.approx(4 / 0.3)
    assert row["bound_tokens_per_s"] == pytest.approx(4 / 0.1556)
    assert row["runs"] == runs
    show([row | {"reached_round_trip_ms": 50.4, "reached_mbit_per_s": 9.7}], Options())
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("50.4", "300.0", "155.6", "1.93", "yes"))


def test_tokens_that_distance_changes_are_told() -> None:
    near = generation(0.1)
    runs = [compare(CHAIN, CELL, near, near, generation(0.1, token=2))]
    assert not summarize(CHAIN, CELL, runs)["tokens_equal"]


def test_subset_is_chosen_on_the_command_line() -> None:
    given = "wan --round-trips-ms 0,50 --bandwidths-mbit 10 --batches 8 --codecs none"
    parsed = make_parser().parse_args([*given.split(), "--sysctls", "net.ipv4.tcp_sack=0"])
    options = Options().updated(
        {key: value for key, value in vars(parsed).items() if key not in ("name", "quick", "json")}
    )
    assert [cell.round_trip_ms for cell in grid(options)] == [0, 50]
    assert options.sysctls == ("net.ipv4.tcp_sack=0",)
    for wrong in (("--codecs", "magic"), ("--sysctls", "tcp_sack"), ("--batches", "0")):
        with pytest.raises(SystemExit):
            make_parser().parse_args(["wan", *wrong])
