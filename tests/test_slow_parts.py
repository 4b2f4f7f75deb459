from __future__ import annotations

from pathlib import Path

from tests.slow_parts import UNKNOWN_S, measured, recorded, slow_files, split

PARTS = 20
LONGEST_S = 12 * 60


def test_every_file_with_slow_tests_is_in_exactly_one_part() -> None:
    files = slow_files()
    parts = split(files, recorded(), PARTS)
    assert sorted(file for part in parts for file in part) == files
    assert len(files) > 40


def test_no_part_takes_more_than_twelve_minutes() -> None:
    seconds = recorded()
    for part in split(slow_files(), seconds, PARTS):
        assert sum(seconds.get(file, UNKNOWN_S) for file in part) <= LONGEST_S, part


def test_recorded_files_exist() -> None:
    assert recorded().keys() <= set(slow_files())


def test_long_files_are_spread_and_unknown_ones_counted() -> None:
    seconds = {"a": 300.0, "b": 200.0, "c": 100.0}
    assert split(["a", "b", "c", "new"], seconds, 2) == [["a", "new"], ["b", "c"]]


def test_seconds_are_added_up_by_file(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="tests.a.test_b" name="x" time="1.5"/>'
        '<testcase classname="tests.a.test_b" name="y" time="2"/>'
        '<testcase classname="tests.test_c" name="z" time="0.25"/>'
        "</testsuite></testsuites>"
    )
    assert measured(report) == {"tests/a/test_b.py": 3.5, "tests/test_c.py": 0.25}
