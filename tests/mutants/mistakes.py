"""The list of deliberate mistakes in `mistakes.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mistakes.toml")


@dataclass(frozen=True, slots=True)
class Mistake:
    """`instead` replaces `text`, which stands exactly once in `file`; one of `tests` must fail.

    `unnoticed` is why no test can tell, where that is so.
    """

    name: str
    what: str
    file: str
    text: str
    instead: str
    tests: str
    unnoticed: str = ""

    def made_in(self, source: str) -> str:
        """Return the file's text with the mistake. Raises `ValueError` if it cannot be made."""
        if source.count(self.text) != 1:
            raise ValueError(f"{self.name}: its text stands {source.count(self.text)} times")
        return source.replace(self.text, self.instead)


def mistakes() -> list[Mistake]:
    listed = tomllib.loads(LIST.read_text("utf-8"))
    return [Mistake(name=name, **fields) for name, fields in listed.items()]
