"""Which models the gateway offers, under which names, and which of them are open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nesa_node.api.bodies.defaults import told
from nesa_node.api.serving.looking import Look, Seen, watch_holes
from nesa_node.core.errors import NesaError
from nesa_node.core.ids import ModelId
from nesa_node.core.logging import get_logger
from nesa_node.core.span import Span
from nesa_node.web.problem import Problem

if TYPE_CHECKING:
    from nesa_node.api.serving.served_model import ServedModel

log = get_logger(__name__)

LOOK_EVERY_S = 5.0
MAX_DISCOVERED = 16
_TRY_AGAIN_S = 600.0
_MAX_REFUSED = 1024

OpenModel = Callable[[str], Awaitable["ServedModel"]]
"""Opens a model by the name or folder that it was given or found under."""
Locate = Callable[[Seen], Awaitable[str]]
"""The name or folder under which a model of the swarm can be opened, checked to be that model.
Raises `NesaError` with what to do if there is none."""


@dataclass(slots=True)
class Card:
    """A model that is offered. `source` is what it is opened by, `name` what clients call it."""

    name: str
    source: str
    created: int
    model_id: ModelId | None = None
    context_length: int | None = None
    served: ServedModel | None = None
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def opened(self) -> bool:
        return self.served is not None

    def answers_to(self, name: str) -> bool:
        return name in (self.name, self.source, self.model_id, self.name.rpartition("/")[2])


class Models:
    """Models opened by name, and closed together.

    Those that are `given` are offered whatever the swarm does; without any, those that are found in
    the swarm and can be opened here.
    """

    def __init__(
        self,
        given: Sequence[str],
        *,
        look: Look,
        open_model: OpenModel,
        locate: Locate,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        self._look = look
        self._look_every_s = look_every_s
        self._open = open_model
        self._locate = locate
        self._discovers = not given
        self._cards = [Card(_last_part(name), name, int(time.time())) for name in given]
        self._seen: dict[ModelId, Seen] | None = None
        self._looked = asyncio.Event()
        self._refused: dict[ModelId, float] = {}

    def cards(self) -> Sequence[Card]:
        return tuple(self._cards)

    def card(self, name: str | None) -> Card:
        """By its name, its source or its last part; None: the first. Raises `Problem`."""
        # Whole names first: a stranger's model may end in what another one is called.
        for card in self._cards:
            if name is None or card.name == name:
                return card
        for card in self._cards:
            if name is not None and card.answers_to(name):
                return card
        offered = ", ".join(card.name for card in self._cards[:20]) or "none"
        shown = "any model" if name is None else f"`{name[:200]}`"
        raise Problem(
            404,
            f"The model {shown} does not exist here; there are: {offered}",
            code="model_not_found",
            param="model",
        )

    async def get(self, name: str | None) -> ServedModel:
        """Opened now if it is asked for the first time. Raises `Problem` and `NesaError`."""
        card = self.card(name)
        if card.served is None:
            async with card.opening:
                if card.served is None:
                    served = await self._open(card.source)
                    try:
                        await served.join()
                    except BaseException:
                        await served.close()
                        raise
                    card.served = served
                    card.model_id = card.served.model_id
                    card.context_length = card.served.context_length
                    log.info("model_opened", model=card.model_id, **told(served.defaults))
        return card.served

    async def open_given(self) -> None:
        """Open those that were given, so that a wrong name is told before anybody asks."""
        for card in self._cards:
            model = await self.get(card.source)
            # The checkpoint's own name: of a hub's model that is owner and name.
            card.name = model.name

    async def close(self) -> None:
        for card in self._cards:
            if card.served is not None:
                await card.served.close()

    async def watch(self, model_id: ModelId) -> None:
        """Raises `MissingBlocksError` once it is known that blocks of the model are missing."""
        await watch_holes(self._look, model_id)

    def holes(self, card: Card) -> tuple[Span, ...] | None:
        """As the last look saw them; None if no node was seen, or nobody has looked."""
        seen = (self._seen or {}).get(card.model_id) if card.model_id is not None else None
        return None if seen is None else seen.holes

    async def keep_looking(self) -> None:
        """Look at the swarm every `look_every_s`; find models if none were given. Runs for ever."""
        async with asyncio.TaskGroup() as group:
            if self._discovers:
                group.create_task(self._keep_discovering())
            while True:
                try:
                    self._see(await self._look.all())
                except NesaError as error:
                    log.warning("swarm_not_seen", reason=str(error))
                await asyncio.sleep(self._look_every_s)

    def _see(self, seen: dict[ModelId, Seen]) -> None:
        self._seen = seen
        self._looked.set()
        if self._discovers:
            # Whoever announces much must not keep others out for good.
            self._cards = [
                card
                for card in self._cards
                if card.served or card.opening.locked() or card.model_id in seen
            ]

    async def _keep_discovering(self) -> None:
        """Beside the looks: to find a model on the hub may take long, and there may be many."""
        while True:
            await self._looked.wait()
            self._looked.clear()
            while (one := self._unknown()) is not None:
                await self._find(one)

    def _unknown(self) -> Seen | None:
        """A model that might be offered too: the one whose last try is longest ago, if any."""
        if len(self._cards) >= MAX_DISCOVERED:
            return None
        known, now = {card.model_id for card in self._cards}, time.monotonic()
        tries = {
            model_id: self._refused.get(model_id, 0.0)
            for model_id in self._seen or {}
            if model_id not in known
        }
        first = min(tries, key=tries.__getitem__, default=None)
        return None if first is None or tries[first] > now else (self._seen or {})[first]

    async def _find(self, one: Seen) -> None:
        model_id = one.model_id
        try:
            source = await self._locate(one)
        except NesaError as error:
            if model_id not in self._refused:
                log.warning("model_not_offered", model=model_id, reason=str(error))
            if len(self._refused) >= _MAX_REFUSED:
                self._refused.clear()
            self._refused[model_id] = time.monotonic() + _TRY_AGAIN_S
            return
        card = Card(one.model_name, source, int(time.time()), model_id, one.context_length)
        self._cards.append(card)
        log.info("model_found", model=model_id)


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2] or name
