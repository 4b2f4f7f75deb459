"""What readers are told of a document that changes, however much they have missed."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nesa_node.dashboard import feed as module
from nesa_node.dashboard.feed import VersionedSections

ENTRIES = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 3))
CHANGES = st.lists(st.tuples(st.sampled_from(["one", "two"]), ENTRIES), max_size=12)


class Reader:
    """Applies news as the page does."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.sections: dict[str, dict[str, Any]] = {}
        self.full = 0

    def read(self, sections: VersionedSections) -> None:
        news = json.loads(sections.encode_since(self.version))
        self.version = news["version"]
        if news["full"]:
            self.sections, self.full = {}, self.full + 1
        for name, entries in news["sections"].items():
            section = self.sections.setdefault(name, {})
            for key, value in entries.items():
                if value is None:
                    section.pop(key, None)
                else:
                    section[key] = value


@given(CHANGES, st.sets(st.integers(0, 12)))
def test_reader_who_looks_now_and_then_knows_what_is_there(
    changes: list[tuple[str, dict[str, int]]], looks: set[int]
) -> None:
    sections, reader, now = VersionedSections(), Reader(), dict[str, dict[str, int]]()
    for number, (name, entries) in enumerate(changes):
        changed = sections.replace_entries(name, entries)
        assert changed == (now.get(name, {}) != entries)
        now[name] = entries
        if number in looks:
            reader.read(sections)
    reader.read(sections)
    assert {name: reader.sections.get(name, {}) for name in now} == now


def test_nothing_new_is_no_version_and_says_nothing() -> None:
    sections = VersionedSections()
    assert sections.replace_entries("nodes", {"a": 1})
    version = sections.version
    assert not sections.replace_entries("nodes", {"a": 1})
    assert sections.version == version
    assert json.loads(sections.encode_since(version))["sections"] == {}


def test_one_that_missed_too_many_removals_gets_everything(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "MAX_REMEMBERED_REMOVALS", 5)
    sections, slow, fast = VersionedSections(), Reader(), Reader()
    for step in range(10):
        sections.replace_entries("nodes", {f"{step}-{index}": step for index in range(3)})
        fast.read(sections)
        if step == 0:
            slow.read(sections)
    slow.read(sections)
    assert slow.sections == fast.sections == {"nodes": {f"9-{index}": 9 for index in range(3)}}
    assert (slow.full, fast.full) == (2, 1)


def test_version_of_another_life_gets_everything() -> None:
    sections = VersionedSections()
    sections.replace_entries("nodes", {"a": 1})
    assert json.loads(sections.encode_since(99))["full"]


def test_sections_that_grow_keep_the_newest_and_send_what_is_new() -> None:
    sections = VersionedSections()
    for at in range(10):
        sections.set_entries("series", {str(at): at}, keep=4)
    version = sections.version
    sections.set_entries("series", {"10": 10}, keep=4)
    assert json.loads(sections.encode_since(version))["sections"] == {"series": {"10": 10}}
    assert list(json.loads(sections.encode_since(None))["sections"]["series"]) == [
        "7",
        "8",
        "9",
        "10",
    ]


def test_keys_may_be_anything() -> None:
    sections = VersionedSections()
    sections.replace_entries("models", {"__proto__": 1, '"</script>': 2, "ü": 3})
    assert json.loads(sections.encode_since(None))["sections"]["models"] == {
        "__proto__": 1,
        '"</script>': 2,
        "ü": 3,
    }
