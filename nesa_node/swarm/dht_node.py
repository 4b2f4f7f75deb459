"""hivemind's DHT node, which does not fetch what it stores."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Any

from nesa_node.swarm.hive import DHTID, DHTNode, PeerID

_Found = Callable[[DHTID, list[DHTID], set[DHTID]], Awaitable[None]]


class MemberNode(DHTNode):  # type: ignore[misc]  # hivemind has no types
    """Looks for the members nearest to a key beside the key.

    Whoever is asked about a key answers with all that lies there, too: hivemind, which asks up to
    20 members before it stores, would have each node fetch all nodes' records from all of them
    whenever it announces itself. Nothing lies under the neighbouring id, to which the same members
    are nearest.
    """

    async def find_nearest_nodes(
        self,
        queries: Collection[DHTID],
        *arguments: Any,
        found_callback: _Found | None = None,
        **options: Any,
    ) -> dict[DHTID, dict[DHTID, PeerID]]:
        """As hivemind's."""
        keys = {DHTID(int(key) ^ 1): key for key in queries}
        if found_callback is not None:
            tell = found_callback

            async def found(beside: DHTID, nearest: list[DHTID], visited: set[DHTID]) -> None:
                await tell(keys[beside], nearest, visited)

            options["found_callback"] = found
        nearest = await super().find_nearest_nodes(tuple(keys), *arguments, **options)
        return {keys[beside]: members for beside, members in nearest.items()}
