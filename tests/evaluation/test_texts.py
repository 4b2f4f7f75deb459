"""Texts of files, of HTML, and of the books that Debian packages."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from nesa_node.core.errors import ConfigError
from nesa_node.evaluation import tasks as texts
from nesa_node.evaluation.tasks import BIBLE, HANDBOOK, default_text, extract_paragraphs, read_text

PAGE = """<!DOCTYPE html><html><head><title>A title that is long enough to be kept</title>
<style>p { color: red }</style><link rel="next" href="x.html"/></head><body>
<ul class="docnav"><li>Prev</li><li>Next</li></ul>
<h1>Heading</h1>
<p>One <em>paragraph</em> with&nbsp;markup &amp; an entity, over
   two lines.<br>
<p>Another that was never closed, and it has words enough <code>apt</code>.
<pre>code that nobody reads as text, however long it may be, is left out</pre>
<script>if (a < b) { document.write("<p>nine words that no reader of it sees</p>") }</script>
<div>Text of a div that <span>stands</span> alone here, too.</div></body></html>"""


def test_prose_keeps_paragraphs_and_drops_the_rest() -> None:
    assert extract_paragraphs(PAGE) == [
        "One paragraph with markup & an entity, over two lines.",
        "Another that was never closed, and it has words enough apt.",
        "Text of a div that stands alone here, too.",
    ]


@pytest.mark.parametrize("html", ["", "<", "</p></pre>", "<pre>never closed", "&#xffffff;", "<!--"])
def test_broken_html_is_no_error(html: str) -> None:
    assert extract_paragraphs(html) == []


def test_a_file_is_read_as_it_is_and_html_as_prose(tmp_path: Path) -> None:
    plain, page = tmp_path / "a.txt", tmp_path / "a.html"
    plain.write_text("<p>As it is, Zürich.</p>\n", encoding="utf-8")
    page.write_text(PAGE, encoding="utf-8")
    assert read_text(str(plain)) == "<p>As it is, Zürich.</p>\n"
    assert read_text(str(page)).split("\n\n") == extract_paragraphs(PAGE)


def test_unreadable_texts_are_errors_that_say_why(tmp_path: Path) -> None:
    binary, empty = tmp_path / "binary", tmp_path / "empty.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    empty.write_text(" \n", encoding="utf-8")
    for path, words in [
        (binary, "UTF-8"),
        (empty, "no text"),
        (tmp_path, "cannot be read"),
        (tmp_path / "absent", "no such file; the books are"),
    ]:
        with pytest.raises(ConfigError, match=words):
            read_text(str(path))


def test_books_that_are_not_installed_name_their_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(texts, "HANDBOOK_FOLDER", tmp_path / "none")
    monkeypatch.setattr(texts, "_BIBLE_COMMAND", "no-such-command-here")
    monkeypatch.chdir(tmp_path)
    for book in (HANDBOOK, BIBLE):
        with pytest.raises(ConfigError, match=f"apt-get install {book}"):
            read_text(book)
    with pytest.raises(ConfigError, match="--text FILE"):
        default_text()


def test_the_handbook_is_all_pages_but_the_index(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("b", "a", "index"):
        page = f"<p>Page {name} has exactly one sentence of nine words.</p>"
        (tmp_path / f"{name}.html").write_text(page, encoding="utf-8")
    monkeypatch.setattr(texts, "HANDBOOK_FOLDER", tmp_path)
    assert read_text(HANDBOOK).split("\n\n") == [
        "Page a has exactly one sentence of nine words.",
        "Page b has exactly one sentence of nine words.",
    ]
    assert default_text() == HANDBOOK


@pytest.mark.skipif(not shutil.which("bible"), reason="bible-kjv is not installed")
def test_the_bible_is_verses_without_their_places() -> None:
    text = read_text(BIBLE)
    lines = text.splitlines()
    assert lines[0] == "In the beginning God created the heaven and the earth."
    assert len(lines) > 31_000
    assert not any(line.split(" ")[0].count(":") for line in lines[:200])


@pytest.mark.skipif(not texts.HANDBOOK_FOLDER.is_dir(), reason="debian-handbook is not installed")
def test_the_installed_handbook_is_running_text() -> None:
    text = read_text(HANDBOOK)
    assert len(text.split()) > 100_000
    assert "<" not in text.split("\n\n")[0]
