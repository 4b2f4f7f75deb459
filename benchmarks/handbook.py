"""Question and answer pairs from the Debian Administrator's Handbook, out of its Debian package."""

from __future__ import annotations

import html
import json
import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

PACKAGE = "debian-handbook"
PAGES = "usr/share/doc/debian-handbook/html/en-US"
_PARTS = re.compile(
    r'<h[1-6] class="title">(?P<title>.*?)</h[1-6]>|<div class="para">(?P<text>.*?)</div>',
    re.DOTALL,
)
_NUMBER = re.compile(r"^(Chapter|Appendix)?\s*[\dA-Z]+(\.\d+)*\.\s*")
MIN_ANSWER_CHARS = 80


def write_records(path: Path) -> int:
    """Write a record of chat for each section with text, in the order of pages; return how many.

    Downloads the package with `apt-get`. Raises `subprocess.CalledProcessError` where that fails.
    """
    with TemporaryDirectory(prefix="nesa-handbook-") as folder:
        subprocess.run(
            ["apt-get", "-q", "download", PACKAGE], cwd=folder, check=True, capture_output=True
        )
        [archive] = Path(folder).glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", archive, folder], check=True)
        pages = sorted((Path(folder) / PAGES).glob("*.html"))
        pairs = dict(pair for page in pages for pair in read_pairs(page.read_text()))
    with path.open("w") as file:
        for title, answer in pairs.items():
            messages = [
                {"role": "user", "content": f"What does the Debian handbook say of: {title}?"},
                {"role": "assistant", "content": answer},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return len(pairs)


def read_pairs(page: str) -> list[tuple[str, str]]:
    """Titles of a page's sections, each with its first paragraph."""
    found, title = [], ""
    for part in _PARTS.finditer(page):
        if part["title"] is not None:
            title = _NUMBER.sub("", _to_text(part["title"]))
        elif title:
            answer = _to_text(part["text"])
            if len(answer) >= MIN_ANSWER_CHARS:
                found.append((title, answer))
            title = ""
    return found


def _to_text(markup: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]*>", "", markup)).split())
