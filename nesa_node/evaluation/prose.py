"""Paragraphs of an HTML page."""

from __future__ import annotations

from html.parser import HTMLParser

LEAST_WORDS = 8
"""Least words of a paragraph; shorter blocks are headings, captions and links."""

_SKIPPED = frozenset({"head", "script", "style", "nav", "pre", "svg", "template"})
_BLOCK_TAGS = (
    "address article aside blockquote body br dd div dl dt figure footer form h1 h2 h3 h4 h5 h6 "
    "header hr li main ol p section table td th tr ul"
)
_BLOCKS = frozenset(_BLOCK_TAGS.split())


class _Prose(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[str] = []
        self._pieces: list[str] = []
        self._skipping: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _SKIPPED:
            self._skipping.append(tag)
        if tag in _BLOCKS or tag in _SKIPPED:
            self.end_block()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _BLOCKS:
            self.end_block()

    def handle_endtag(self, tag: str) -> None:
        if tag in self._skipping:
            while self._skipping.pop() != tag:
                pass
        if tag in _BLOCKS or tag in _SKIPPED:
            self.end_block()

    def handle_data(self, data: str) -> None:
        if not self._skipping:
            self._pieces.append(data)

    def end_block(self) -> None:
        words = "".join(self._pieces).split()
        self._pieces = []
        if len(words) >= LEAST_WORDS:
            self.blocks.append(" ".join(words))


def prose(html: str) -> list[str]:
    """The paragraphs of a page in order, each on one line, without code, navigation and headings.

    Malformed HTML is parsed leniently; no input raises an error.
    """
    parser = _Prose()
    parser.feed(html)
    parser.close()
    parser.end_block()
    return parser.blocks
