"""Where a session's rows began: what nodes held before they were sent anything, and what follows.

Nobody keeps outputs of the tokens that a row began with. A node that comes later and holds fewer of
them cannot be brought to where the others are by its neighbour: all go back to what it holds.
"""

from __future__ import annotations

from collections.abc import Sequence

from nesa_node.swarm.messages import PREFIX_TOKENS, Opened, Prefix


class Beginning:
    """Every sender keeps what it sent from `start[row]` on, the client what it sent at all."""

    def __init__(self, rows: int, prefix: Prefix = ()) -> None:
        self.start = [0] * rows
        self.prefix = prefix
        """What nodes that are opened may find in their caches."""
        self._is_behind = False

    def held_by(self, opened: Opened | None) -> tuple[int, ...]:
        """What a node says that it holds, as far as it was asked for."""
        if opened is None or not self.prefix or len(opened.held) != len(self.prefix):
            return (0,) * len(self.start)
        return tuple(
            min(held, PREFIX_TOKENS * len(digests))
            for held, digests in zip(opened.held, self.prefix, strict=True)
        )

    def agree(
        self, reached: Sequence[Sequence[int]], lengths: Sequence[int] | None, *, alone: bool
    ) -> bool:
        """Set `start` so that everybody can begin there; whether all must, who were further too.

        `reached` is what each of the nodes that are new holds; with `alone` there are no others.
        Where all must go back they are `behind` until `caught_up`. `lengths` is where the session
        is; None: nothing was sent yet.
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
        """A step was done: everybody is where the session is."""
        self._is_behind = False

    def truncate(self, lengths: Sequence[int]) -> None:
        """The session forgets tokens from `lengths` on; others may follow than were announced."""
        self.start = [min(pair) for pair in zip(self.start, lengths, strict=True)]
        self.prefix = tuple(
            digests[: length // PREFIX_TOKENS]
            for digests, length in zip(self.prefix, lengths, strict=bool(self.prefix))
        )

    def reorder(self, sources: Sequence[int]) -> None:
        """Let each row have begun like row `sources[row]`."""
        self.start = [self.start[source] for source in sources]
        if self.prefix:
            self.prefix = tuple(self.prefix[source] for source in sources)
