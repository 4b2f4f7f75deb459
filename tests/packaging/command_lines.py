"""Where documents and deployment files say `nesa-node ...`, and which settings they name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

_COMMAND = re.compile(r"(?<![\w/.-])(?:/opt/nesa-node/bin/)?nesa-node ([a-z]+(?: .*)?)$")
_IN_TEXT = re.compile(r"`nesa-node ([^`]*)`")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SHELL = ("", "console", "sh", "bash")
_PROSE = re.compile(r"^\s*# \S")
_OPTIONAL = re.compile(r"\[(-[^\]]*)\]")


class Line(NamedTuple):
    path: Path
    text: str

    def words(self) -> list[str]:
        """What the shell would pass on after `nesa-node`."""
        text = _OPTIONAL.sub(r"\1", self.text)
        lexer = shlex.shlex(text, posix=True, punctuation_chars="|;<>&")
        lexer.whitespace_split = True
        lexer.commenters = "#"
        words: list[str] = []
        for word in lexer:
            if set(word) <= set("|;<>&"):
                break
            words.append(word)
        return words


def deployment_files() -> list[Path]:
    return sorted(path for path in (ROOT / "deploy").rglob("*") if path.is_file())


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def command_lines() -> Iterator[Line]:
    """Every `nesa-node ...` of the documents' shell blocks and of `deploy/`.

    Comments are prose, unless they are set in by more than one space.
    """
    for path in documents():
        for language, block in _FENCE.findall(path.read_text(encoding="utf-8")):
            if language in _SHELL:
                yield from _lines(path, block)
    for path in deployment_files():
        if path.suffix not in {".json", ".md"}:
            yield from _lines(path, _unfolded(path.read_text(encoding="utf-8")))


def mentions() -> Iterator[Line]:
    """`nesa-node ...` within sentences, where most often only a command is named.

    In the protocol such words are prefixes of what is signed.
    """
    for path in documents():
        if path.name == "protocol.md":
            continue
        for text in _IN_TEXT.findall(path.read_text(encoding="utf-8")):
            yield Line(path, text)


def toml_blocks() -> Iterator[Line]:
    """TOML that documents show, and that of the units' comments."""
    for path in documents():
        for language, block in _FENCE.findall(path.read_text(encoding="utf-8")):
            if language == "toml":
                yield Line(path, block)
    for path in sorted((ROOT / "deploy").glob("*.service")):
        text = path.read_text(encoding="utf-8")
        lines = re.findall(r"^#   (\w+ = .*)$", text, flags=re.MULTILINE)
        yield Line(path, "\n".join(lines))


def variables() -> Iterator[Line]:
    """Every `NESA_...` of documents and deployment files."""
    for path in [*documents(), *deployment_files()]:
        for name in re.findall(r"\bNESA_[A-Z0-9_]*[A-Z0-9]\b", path.read_text(encoding="utf-8")):
            yield Line(path, name)


def _lines(path: Path, text: str) -> Iterator[Line]:
    for line in text.replace("\\\n", " ").splitlines():
        if _PROSE.match(line):
            continue
        if found := _COMMAND.search(line.rstrip()):
            yield Line(path, found.group(1))


def _unfolded(text: str) -> str:
    """YAML's folded blocks as one line each, without compose's doubled dollars."""
    lines: list[str] = []
    margin: int | None = None
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if margin is not None and line.strip() and indent > margin:
            lines[-1] += " " + line.strip().replace("$$", "$")
            continue
        margin = indent if line.rstrip().endswith(">-") else None
        lines.append(line)
    return "\n".join(lines)
