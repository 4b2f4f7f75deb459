"""Whoever installs this package gets permissive licences only."""

from __future__ import annotations

import re
from importlib import metadata

from packaging.requirements import Requirement


def closure(root: str) -> set[str]:
    """All distributions that `root` needs here, extras apart."""
    found: set[str] = set()
    todo = [root]
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in found:
            continue
        found.add(name)
        for line in metadata.requires(name) or []:
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                todo.append(needed.name)
    return found


def licence(name: str) -> str:
    told = metadata.metadata(name).json
    classifiers = [text for text in told.get("classifier", ()) if text.startswith("License")]
    # Some packages put the whole text into the field; its first line names the licence.
    first = next(iter(str(told.get("license", "")).strip().splitlines()), "")
    return " | ".join([str(told.get("license_expression", "")), first, *classifiers])


def test_no_dependency_is_under_a_gpl() -> None:
    names = closure("nesa-node")
    assert {"torch", "hivemind", "transformers"} <= names
    copyleft = {name: licence(name) for name in names if re.search(r"\bA?GPL|GNU", licence(name))}
    assert copyleft == {}
