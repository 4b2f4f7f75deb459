from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS, main, make_parser, numbers
from benchmarks.emulator.namespaces import why_unavailable
from benchmarks.options import Options
from benchmarks.results import write_result


def test_each_row_says_where_and_how_it_was_measured(tmp_path: Path) -> None:
    options = Options(seed=7, nodes=(1, 3))
    rows = [{"nodes": nodes, "runs": [{"seconds": 1.5}, {"seconds": 2.5}]} for nodes in (1, 3)]
    path = write_result("decode", rows, tmp_path / "new" / "d.json", options=options.as_json())
    written = json.loads(path.read_text(encoding="utf-8"))
    assert [row["nodes"] for row in written] == [1, 3]
    for row in written:
        assert row["benchmark"] == "decode"
        assert row["options"]["seed"] == 7
        assert {"processor", "cpu_flags", "cores", "python", "torch"} <= row["machine"].keys()
        assert row["measured_at"].endswith("Z")
        assert [run["seconds"] for run in row["runs"]] == [1.5, 2.5]


def test_options_that_are_given_replace_the_benchmarks_own() -> None:
    given = {"model": "50m", "nodes": (2,), "runs": None}
    options = Options(runs=3).updated(given)
    assert (options.model, options.nodes, options.runs) == ("50m", (2,), 3)


def test_every_benchmark_has_defaults_and_a_quick_form() -> None:
    for name, module in BENCHMARKS.items():
        assert isinstance(module.DEFAULTS, Options), name
        assert isinstance(module.QUICK, Options), name
        assert module.QUICK.runs <= module.DEFAULTS.runs, name
        # Churn's events and regions' phases are their runs; a plan for thousands of nodes is the
        # same every time.
        assert module.DEFAULTS.runs >= 5 or name in ("churn", "regions", "scale")


def test_numbers_are_read_from_a_list() -> None:
    assert numbers("1,2,6") == (1, 2, 6)
    with pytest.raises(ValueError, match="at least 1"):
        numbers("0")
    with pytest.raises(SystemExit):
        make_parser().parse_args(["decode", "--nodes", "two"])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(set(BENCHMARKS) - {"swarm", "regions"}))
def test_quick_form_runs_and_writes_its_rows(name: str, tmp_path: Path) -> None:
    if name == "wan" and (reason := why_unavailable()) is not None:
        pytest.skip(reason)
    path = tmp_path / "result.json"
    main([name, "--quick", "--json", str(path)])
    rows = json.loads(path.read_text(encoding="utf-8"))
    assert rows
    for row in rows:
        assert row["benchmark"] == name
        assert row["runs"], "every run is kept"
