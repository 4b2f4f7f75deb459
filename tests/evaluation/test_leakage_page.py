"""`docs/privacy.md` is what the file of results gives, and claims no more than was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nesa_node.core.errors import ConfigError
from nesa_node.evaluation.leakage_claims import CLAIMS, TOKEN_ATTACKS
from nesa_node.evaluation.leakage_page import (
    check_claims,
    make_page,
    read_leakage,
    write_leakage,
)
from nesa_node.evaluation.leakage_rows import LeakageRow, Recovered

ROOT = Path(__file__).parents[2]
RESULTS = "benchmarks/results/leakage-2026-11-30.json"


@pytest.fixture(scope="module")
def measured() -> list[LeakageRow]:
    return read_leakage(ROOT / RESULTS)[0]


def test_the_page_is_what_the_results_give() -> None:
    rows, options = read_leakage(ROOT / RESULTS)
    assert (ROOT / "docs/privacy.md").read_text() == make_page(rows, options, source=RESULTS)


def test_rows_say_of_how_many_tokens_they_are(measured: list[LeakageRow]) -> None:
    """Modes that encrypt are attacked on fewer than the page's introduction says."""
    lines = (ROOT / "docs/privacy.md").read_text().splitlines()
    for row in measured:
        at = next(at for at, line in enumerate(lines) if f"| {row.mode} | {row.setting} |" in line)
        for each, line in zip(row.recovered, lines[at:], strict=False):
            if each.attack in TOKEN_ATTACKS:
                assert f"{each.percent:.1f}% of {each.tokens} (" in line
        if CLAIMS[row.mode].hides_tokens:
            assert row.setting.endswith("scaled from one block")


def test_no_claim_is_more_than_was_measured(measured: list[LeakageRow]) -> None:
    assert check_claims(measured) == []


def test_a_claim_that_an_attack_breaks_is_found(measured: list[LeakageRow]) -> None:
    hidden = [mode for mode, claim in CLAIMS.items() if claim.hides_tokens]
    assert "ckks" in hidden
    for mode in hidden:
        broken = [
            replace(row, recovered=(Recovered("ridge probe", 30, 100), *row.recovered))
            if row.mode == mode
            else row
            for row in measured
        ]
        assert check_claims(broken)[0].startswith(f"{mode}: ridge probe recovers 30.0%")
        with pytest.raises(ConfigError, match="do not hold what is claimed"):
            make_page(broken, {}, source="")


def test_an_attack_on_other_tokens_has_a_chance_of_its_own(measured: list[LeakageRow]) -> None:
    own = Recovered("ridge probe", 30, 100, chance_percent=31.4)
    rows = [
        replace(row, recovered=(own, *row.recovered)) if row.mode == "ckks" else row
        for row in measured
    ]
    assert check_claims(rows) == []
    page = make_page(rows, read_leakage(ROOT / RESULTS)[1], source="")
    assert "| ridge probe | 30.0% of 100 (21.9 to 39.6) | 31.4% |" in page


def test_a_mode_without_an_attack_or_a_claim_is_found(measured: list[LeakageRow]) -> None:
    for mode, claim in CLAIMS.items():
        rest = [row for row in measured if row.mode != mode]
        assert len(check_claims(rest)) == len(claim.attacks)
    assert check_claims([*measured, replace(measured[0], mode="magic")]) == ["magic: no claim"]


def test_files_are_read_as_they_were_written(measured: list[LeakageRow], tmp_path: Path) -> None:
    write_leakage(measured, tmp_path / "rows.json", options={"model": "m"})
    assert read_leakage(tmp_path / "rows.json") == (measured, {"model": "m"})
    (tmp_path / "other.json").write_text('[{"benchmark": "eval"}]')
    with pytest.raises(ConfigError, match="no results of nesa-node leakage"):
        read_leakage(tmp_path / "other.json")
