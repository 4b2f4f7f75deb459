"""Start positions of a session's rows: tokens that nodes reuse from their prefix caches.

No sender keeps outputs of reused tokens, so that a node which joins later and holds fewer of them
cannot be filled by its neighbour: then all nodes go back to what that node holds.
"""

from __future__ import annotations

from collections.abc import Sequence

from nesa_node.swarm.messages import PREFIX_TOKENS, Opened, Prefix


class Beginning:
    """Position from which each row's tokens are replayable. The client keeps all inputs."""

    def __init__(self, rows: int, prefix: Prefix = ()) -> None:
        self.start = [0] * rows
        self.prefix = prefix
        """Digests that are sent to nodes, which look for them in their prefix caches."""
        self._is_behind = False

    def held_by(self, opened: Opened | None) -> tuple[int, ...]:
        """Tokens of each row that a node reports as reused, at most those that were announced."""
        if opened is None or not self.prefix or len(opened.held) != len(self.prefix):
            return (0,) * len(self.start)
        return tuple(
            min(held, PREFIX_TOKENS * len(digests))
            for held, digests in zip(opened.held, self.prefix, strict=True)
        )

    def agree(
        self, reached: Sequence[Sequence[int]], lengths: Sequence[int] | None, *, alone: bool
    ) -> bool:
        """Lower `start` to what all nodes hold; return whether the whole chain must go back.

        `reached` has the tokens per row that each new node holds. `alone` says that the chain has
        new nodes only. `lengths` are the session's lengths, None before its first step. After going
        back, nodes lag behind the session until `caught_up`.
        """
        start = self.start
        floor = list(reached[0]) if alone and reached else list(start)
        for held in (*reached, *([] if lengths is None else [lengths])):
            floor = [min(pair) for pair in zip(floor, held, strict=True)]
        goes_back = self._is_behind or any(new < old for new, old in zip(floor, start, strict=True))
        self.start = floor
        self._is_behind = goes_back or (alone and lengths is not None and floor != list(lengths))
        return goes_back

    def caught_up(self) -> None:
        """Note that a step is complete: all nodes are at the session's lengths."""
        self._is_behind = False

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget tokens from `lengths` on, and the digests of pages that reach beyond."""
        self.start = [min(pair) for pair in zip(self.start, lengths, strict=True)]
        self.prefix = tuple(
            digests[: length // PREFIX_TOKENS]
            for digests, length in zip(self.prefix, lengths, strict=bool(self.prefix))
        )

    def reorder(self, sources: Sequence[int]) -> None:
        """Let each row continue row `sources[row]`."""
        self.start = [self.start[source] for source in sources]
        if self.prefix:
            self.prefix = tuple(self.prefix[source] for source in sources)
