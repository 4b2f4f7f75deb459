"""Prefix-cache view of one session: pages it reuses, and pages it publishes for reuse.

Pages are shared by sessions of one peer, or of any trusted peer if this one is trusted. Other peers
can neither find them nor leave pages to be found.
"""

from __future__ import annotations

from collections.abc import Sequence

from nesa_node.core.errors import ProtocolError
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.engine.cache.pages import PAGE_TOKENS, PageTable
from nesa_node.engine.cache.prefix_index import PrefixKey
from nesa_node.server.session.admission import AdmissionLimits
from nesa_node.swarm.protocol.messages import MAX_PREFIX_DIGESTS, PREFIX_TOKENS, Open, Prefix

log = get_logger(__name__)

assert PAGE_TOKENS == PREFIX_TOKENS, "a digest names what one page ends with"

TRUSTED_SCOPE = PeerId("")
"""Scope shared by all trusted peers; no peer id is empty."""


class PrefixCacheView:
    """One session's keys into the pool's prefix cache.

    The client names its tokens by digests only. A false digest harms only peers in the same scope.
    """

    def __init__(
        self, tables: Sequence[PageTable], opened: Open, client: PeerId, limits: AdmissionLimits
    ) -> None:
        """Let the empty `tables` begin with matching cached pages."""
        self._tables = tables
        self._scope = TRUSTED_SCOPE if client in limits.trusted else client
        self._blocks = opened.blocks
        # A successor receives its pages from the donor.
        prefix = opened.prefix if opened.donor is None else ()
        pages = opened.max_tokens // PAGE_TOKENS
        self._keys = [keys[:pages] for keys in self._keys_of(prefix)]
        self._published_pages = [0] * len(tables)
        for table, keys in zip(tables, self._keys, strict=True):
            table.reuse_prefix(keys)
        reused = sum(table.length for table in tables)
        if reused:
            log.info("prefix_reused", tokens=reused)

    def publish(self) -> None:
        """Publish the full pages of the announced prefixes that the rows have computed."""
        for row, (table, keys) in enumerate(zip(self._tables, self._keys, strict=True)):
            full = min(len(keys), table.length // PAGE_TOKENS)
            if full > self._published_pages[row]:
                table.publish_prefix(keys)
                self._published_pages[row] = full

    def publish_as(self, prefix: Prefix) -> None:
        """Publish the rows' pages under the digests of `prefix`.

        Raises `ProtocolError`.
        """
        check_prefix(prefix, len(self._tables))
        for table, keys in zip(self._tables, self._keys_of(prefix), strict=True):
            table.publish_prefix(keys)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Drop the keys from `lengths` on: other tokens than announced may follow."""
        self._keys = [
            keys[: length // PAGE_TOKENS] for keys, length in zip(self._keys, lengths, strict=True)
        ]
        self._published_pages = [
            min(done, len(keys))
            for done, keys in zip(self._published_pages, self._keys, strict=True)
        ]

    def reorder(self, sources: Sequence[int]) -> None:
        """Let each row continue with the keys of row `sources[row]`."""
        self._keys = [self._keys[source] for source in sources]
        self._published_pages = [self._published_pages[source] for source in sources]

    def _keys_of(self, prefix: Prefix) -> list[list[PrefixKey]]:
        rows: list[list[PrefixKey]] = [
            [(self._scope, self._blocks, digest) for digest in digests] for digests in prefix
        ]
        return rows + [[] for _ in range(len(self._tables) - len(rows))]


def check_prefix(prefix: Prefix, rows: int) -> None:
    """Raises `ProtocolError("bad_prefix")` for more digests than a session of `rows` may name."""
    if len(prefix) > rows:
        raise ProtocolError("bad_prefix", f"prefixes of {len(prefix)} rows, there are {rows}")
    digests = sum(map(len, prefix))
    if digests > MAX_PREFIX_DIGESTS:
        raise ProtocolError(
            "bad_prefix", f"{digests} digests; at most {MAX_PREFIX_DIGESTS} are read"
        )
