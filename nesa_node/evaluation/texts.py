"""Texts for evaluation: files, and two books packaged by Debian."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from nesa_node.core.errors import ConfigError
from nesa_node.core.user_file import read_limited, user_path
from nesa_node.evaluation.prose import prose

HANDBOOK = "debian-handbook"
BIBLE = "bible-kjv"
HANDBOOK_FOLDER = Path("/usr/share/doc/debian-handbook/html/en-US")
_BIBLE_COMMAND = "bible"
_WHOLE_BIBLE = "Ge1:1-Rev22:21"
_TIMEOUT_S = 60
MAX_FILE_CHARS = 1 << 28
_HTML = frozenset({".html", ".htm", ".xhtml"})


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
            return _handbook(HANDBOOK_FOLDER)
        if source == BIBLE:
            return _bible()
        raise ConfigError(f"--text {source}: no such file; the books are {HANDBOOK} and {BIBLE}")
    text = _read_file(path)
    if path.suffix.lower() in _HTML:
        text = "\n\n".join(prose(text))
    if not text.strip():
        raise ConfigError(f"--text {source}: the file has no text")
    return text


def _handbook(folder: Path) -> str:
    pages = sorted(folder.glob("*.html"))
    # The index only repeats headings.
    blocks = [block for page in pages if page.stem != "index" for block in prose(_read_file(page))]
    if not blocks:
        raise ConfigError(f"--text {HANDBOOK}: not installed: apt-get install {HANDBOOK}")
    return "\n\n".join(blocks)


def _bible() -> str:
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
