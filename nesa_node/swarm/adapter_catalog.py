"""Names of published adapters: which one is meant by `name` or `author/name`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nesa_node.core.errors import AdapterError
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.swarm.dht.adapter_notices import AdapterNotice, ListedAdapter

MIN_AUTHOR_CHARS = 6
"""Shortest end of a peer id that names an author."""
_MAX_SHOWN = 8


@dataclass(frozen=True, slots=True)
class PublishedAdapter:
    """An adapter that `author` has listed for a model, until `expires_at` (seconds since 1970)."""

    model_id: ModelId
    author: PeerId
    listed: ListedAdapter
    expires_at: float

    @property
    def name(self) -> str:
        """The name that no other adapter of the model has."""
        return f"{self.author}/{self.listed.name}"

    @property
    def digest(self) -> str:
        return self.listed.digest

    def as_json(self) -> dict[str, Any]:
        return {
            "model_id": self.model_id,
            "author": self.author,
            "expires_at": self.expires_at,
            **self.listed.model_dump(mode="json"),
        }


def list_published(notices: Iterable[AdapterNotice]) -> tuple[PublishedAdapter, ...]:
    """All adapters of valid notices, by name and author."""
    found = [
        PublishedAdapter(ModelId(notice.model_id), notice.signer, listed, notice.expires_at)
        for notice in notices
        for listed in notice.adapters
    ]
    return tuple(sorted(found, key=lambda each: (each.listed.name, each.author)))


def name_published(published: Sequence[PublishedAdapter]) -> dict[str, PublishedAdapter]:
    """Adapters by a name for `find_published`: with the author where several use it."""
    authors = Counter(each.listed.name for each in published)
    return {
        each.listed.name if authors[each.listed.name] == 1 else each.name: each
        for each in published
    }


def find_published(published: Iterable[PublishedAdapter], text: str) -> PublishedAdapter:
    """The adapter that `text` names: `name`, `author/name` or a digest.

    `author` is a peer id, or its end of at least `MIN_AUTHOR_CHARS` characters. Raises
    `AdapterError` where there is none, and where two authors use a name that is given alone: any
    peer may publish under any name, so that the author must be given then.
    """
    author, _, name = text.removeprefix("…").rpartition("/")  # as tables show a peer id's end
    if author and len(author) < MIN_AUTHOR_CHARS:
        raise AdapterError(
            f"{text!r:.200}: give at least the last {MIN_AUTHOR_CHARS} characters of the author's "
            "peer id before the /"
        )
    found = [
        each
        for each in published
        if (each.listed.name == name and each.author.endswith(author)) or each.digest == text
    ]
    if not found:
        raise AdapterError(f"no adapter {text!r:.200} is published; `nesa-node adapters list`")
    if len({each.digest for each in found}) > 1:
        names = ", ".join(f"{each.author[-8:]}/{each.listed.name}" for each in found[:_MAX_SHOWN])
        raise AdapterError(f"{text!r:.200} is published by several authors; give one of: {names}")
    return found[0]
