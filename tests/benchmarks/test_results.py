from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from benchmarks import results
from benchmarks.__main__ import BENCHMARKS, main, make_parser, numbers
from benchmarks.emulator.namespaces import why_unavailable
from benchmarks.options import Options
from benchmarks.results import write_result


def test_each_row_says_where_and_how_it_was_measured(tmp_path: Path) -> None:
    options = Options(seed=7, nodes=(1, 3))
    rows = [{"nodes": nodes, "runs": [{"seconds": 1.5}, {"seconds": 2.5}]} for nodes in (1, 3)]
    target = tmp_path / "new" / "d.json"
    path = write_result("decode", rows, target, options=options.as_json(), load_before=[1, 2, 3])
    written = json.loads(path.read_text(encoding="utf-8"))
    assert [row["nodes"] for row in written] == [1, 3]
    for row in written:
        assert row["benchmark"] == "decode"
        assert row["options"]["seed"] == 7
        assert {"processor", "cpu_flags", "cores", "python", "torch"} <= row["machine"].keys()
        assert row["measured_at"].endswith("Z")
        assert row["load_average"]["before"] == [1, 2, 3]
        assert len(row["load_average"]["after"]) == 3
        assert row["source"].keys() == {"commit", "uncommitted_changes"}
        assert [run["seconds"] for run in row["runs"]] == [1.5, 2.5]


def test_a_row_cannot_hide_where_it_was_measured(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="machine"):
        write_result("x", [{"machine": "idle"}], tmp_path / "x.json", options={}, load_before=[])


def test_options_that_are_given_replace_the_benchmarks_own() -> None:
    given = {"model": "50m", "nodes": (2,), "runs": None}
    options = Options(runs=3).updated(given)
    assert (options.model, options.nodes, options.runs) == ("50m", (2,), 3)


COUNTS = {
    "audit-attacks",
    "audit-evasion",
    "audit-framing",
    "audit-thresholds",
    "distribution-votes",
    "finetuning",
    "honest-audits",
    "honest-sessions",
}
"""Benchmarks whose rows are counts and losses, that no second run would change."""


def test_every_benchmark_has_defaults_and_a_quick_form() -> None:
    for name, module in BENCHMARKS.items():
        assert isinstance(module.DEFAULTS, Options), name
        assert isinstance(module.QUICK, Options), name
        assert module.QUICK.runs <= module.DEFAULTS.runs, name
        # Events of churn, phases of regions, weeks of a forecast and clients of large swarms are
        # runs, too; a plan for thousands of nodes is the same every time.
        assert module.DEFAULTS.runs >= 5 or name in (
            "churn",
            "forecast",
            "large",
            "regions",
            "scale",
        )


def test_numbers_are_read_from_a_list() -> None:
    assert numbers("1,2,6") == (1, 2, 6)
    with pytest.raises(ValueError, match="at least 1"):
        numbers("0")
    with pytest.raises(SystemExit):
        make_parser().parse_args(["decode", "--nodes", "two"])


def test_the_commit_that_is_measured_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path / "project" / "results")
    results.FOLDER.mkdir(parents=True)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    assert results.source() == {"commit": None, "uncommitted_changes": None}
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", "first"], check=True)
    clean = results.source()
    assert len(clean["commit"]) == 40
    assert clean["uncommitted_changes"] is False
    (results.FOLDER / "new.json").write_text("[]", encoding="utf-8")
    assert results.source() == clean | {"uncommitted_changes": True}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["routing", "--matrix", "{tmp}/missing.npz"], "missing.npz"),
        (["routing", "--matrix", "{tmp}/text.npz"], "is no .npz"),
        (["estimate", "--matrix", "{tmp}/oblong.npz"], "must be"),
        (["decode", "--model", "{tmp}/nowhere"], "has no config.json"),
        (["pictures", "--scorer", "{tmp}"], "--scorer: "),
        (["decode", "--runs", "0"], "1 or more"),
        (["decode", "--json", "{tmp}"], "is a folder"),
        (["decode", "--json", "{tmp}/text.npz/result.json"], "cannot write to"),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_measured(
    given: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "text.npz").write_text("no archive", encoding="utf-8")
    np.savez(tmp_path / "oblong.npz", np.zeros((3, 4)))

    def measured(_: Options) -> None:
        raise AssertionError("it began to measure")

    monkeypatch.setattr(BENCHMARKS[given[0]], "run", measured)
    with pytest.raises(SystemExit) as ended:
        main([part.format(tmp=tmp_path) for part in given])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


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
        is_measured = name not in COUNTS and row.get("part") != "arithmetic"
        assert not is_measured or row["runs"], "every run is kept"
