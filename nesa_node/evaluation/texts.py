"""Texts for evaluation: files, and two books packaged by Debian.

Paragraphs of an HTML page.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

from nesa_node.core.errors import ConfigError
from nesa_node.core.settings.user_file import read_limited, user_path

MIN_PARAGRAPH_WORDS = 8
"""Least words of a paragraph; shorter blocks are headings, captions and links."""

_SKIPPED_TAGS = frozenset({"head", "script", "style", "nav", "pre", "svg", "template"})
_BLOCK_TAGS = (
    "address article aside blockquote body br dd div dl dt figure footer form h1 h2 h3 h4 h5 h6 "
    "header hr li main ol p section table td th tr ul"
)
_BLOCK_ELEMENTS = frozenset(_BLOCK_TAGS.split())


class _ParagraphParser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[str] = []
        self._pieces: list[str] = []
        self._skipping: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _SKIPPED_TAGS:
            self._skipping.append(tag)
        if tag in _BLOCK_ELEMENTS or tag in _SKIPPED_TAGS:
            self.end_block()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _BLOCK_ELEMENTS:
            self.end_block()

    def handle_endtag(self, tag: str) -> None:
        if tag in self._skipping:
            while self._skipping.pop() != tag:
                pass
        if tag in _BLOCK_ELEMENTS or tag in _SKIPPED_TAGS:
            self.end_block()

    def handle_data(self, data: str) -> None:
        if not self._skipping:
            self._pieces.append(data)

    def end_block(self) -> None:
        words = "".join(self._pieces).split()
        self._pieces = []
        if len(words) >= MIN_PARAGRAPH_WORDS:
            self.blocks.append(" ".join(words))


def extract_paragraphs(html: str) -> list[str]:
    """The paragraphs of a page in order, each on one line, without code, navigation and headings.

    Malformed HTML is parsed leniently; no input raises an error.
    """
    parser = _ParagraphParser()
    parser.feed(html)
    parser.close()
    parser.end_block()
    return parser.blocks


HANDBOOK = "debian-handbook"
BIBLE = "bible-kjv"
HANDBOOK_FOLDER = Path("/usr/share/doc/debian-handbook/html/en-US")
_BIBLE_COMMAND = "bible"
_WHOLE_BIBLE = "Ge1:1-Rev22:21"
_TIMEOUT_S = 60
MAX_FILE_CHARS = 1 << 28
_HTML_SUFFIXES = frozenset({".html", ".htm", ".xhtml"})


def default_text() -> str:
    """The name of an installed book. Raises `ConfigError` if there is none."""
    if HANDBOOK_FOLDER.is_dir():
        return HANDBOOK
    if shutil.which(_BIBLE_COMMAND):
        return BIBLE
    raise ConfigError(
        f"no text to evaluate on: give --text FILE, or apt-get install {HANDBOOK} or {BIBLE}"
    )


def read_text(source: str) -> str:
    """The text of a file (the paragraphs of HTML), or of `debian-handbook` or `bible-kjv`.

    A file takes precedence over a book of the same name. Raises `ConfigError`.
    """
    path = user_path(source)
    if not path.exists():
        if source == HANDBOOK:
            return _read_handbook(HANDBOOK_FOLDER)
        if source == BIBLE:
            return _read_bible()
        raise ConfigError(f"--text {source}: no such file; the books are {HANDBOOK} and {BIBLE}")
    text = _read_file(path)
    if path.suffix.lower() in _HTML_SUFFIXES:
        text = "\n\n".join(extract_paragraphs(text))
    if not text.strip():
        raise ConfigError(f"--text {source}: the file has no text")
    return text


def _read_handbook(folder: Path) -> str:
    pages = sorted(folder.glob("*.html"))
    # The index only repeats headings.
    blocks = [
        block
        for page in pages
        if page.stem != "index"
        for block in extract_paragraphs(_read_file(page))
    ]
    if not blocks:
        raise ConfigError(f"--text {HANDBOOK}: not installed: apt-get install {HANDBOOK}")
    return "\n\n".join(blocks)


def _read_bible() -> str:
    try:
        told = subprocess.run(
            [_BIBLE_COMMAND, "-f", _WHOLE_BIBLE],
            capture_output=True,
            encoding="utf-8",
            timeout=_TIMEOUT_S,
            check=True,
        )
    except FileNotFoundError as error:
        raise ConfigError(f"--text {BIBLE}: not installed: apt-get install {BIBLE}") from error
    except (subprocess.SubprocessError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {BIBLE}: the command `bible` failed ({error})") from error
    # With -f each line is a verse after its reference, such as `Ge1:1`.
    return re.sub(r"^\S+:\d+ ", "", told.stdout, flags=re.MULTILINE)


def _read_file(path: Path) -> str:
    try:
        return read_limited(path, MAX_FILE_CHARS)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path}: cannot be read as UTF-8 ({error})") from error
