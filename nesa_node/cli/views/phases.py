"""The table of `--stats`: what a command waited for, and how long."""

from __future__ import annotations

from collections.abc import Mapping

_TITLE, _REST = "waited for", "all else"


def format_phases(seconds: Mapping[str, float], total_s: float) -> str:
    """Lines of a table with the longest wait first, each without what it was interrupted by."""
    named = sorted(seconds.items(), key=lambda each: -each[1])
    rows = [*named, (_REST, max(total_s - sum(seconds.values()), 0.0)), ("total", total_s)]
    width = max(len(name) for name, _ in [(_TITLE, 0), *rows])
    lines = [f"{_TITLE:<{width}}  seconds       %"]
    lines += [f"{name:<{width}}  {spent:7.2f}  {spent / total_s:6.1%}" for name, spent in rows]
    return "\n".join(lines)
