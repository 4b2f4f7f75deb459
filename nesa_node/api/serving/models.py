"""Which models the gateway offers, under which names, and which of them are open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nesa_node.api.bodies.defaults import told
from nesa_node.api.serving.looking import Look, Seen, watch_holes
from nesa_node.core.errors import ModelError, NesaError, ResourceError
from nesa_node.core.ids import ModelId
from nesa_node.core.logging import get_logger
from nesa_node.core.span import Span
from nesa_node.core.waiting import waiting
from nesa_node.web.problem import Problem

if TYPE_CHECKING:
    from nesa_node.api.serving.served_model import ServedModel

log = get_logger(__name__)

LOOK_EVERY_S = 5.0
MAX_DISCOVERED = 256
MAX_OPEN = 16
"""Discovered models open at once: each takes memory for its embedding and head. For one more, the
one that was used longest ago is closed, if it has no request."""
_TRY_AGAIN_S = 600.0
_FETCH_AGAIN_S = 60.0
_MAX_REFUSED = 1024

OpenModel = Callable[[str, frozenset[ModelId] | None], Awaitable["ServedModel"]]
"""Opens a model by the name or folder that the operator gave (None), or under which the swarm
announces one of those ids; raises `NesaError` where it turns out to be none of them."""
Locate = Callable[[Seen], Awaitable[str]]
"""The name or folder under which a model of the swarm might be opened here; nothing is fetched.
Raises `NesaError` with what to do if there is none."""


@dataclass(slots=True)
class Card:
    """A model that is offered. `source` is what it is opened by, `name` what clients call it.

    `announced` are the ids under which the swarm has that name, in the order in which they were
    found: which of them is the model's is known once it is open (`model_id`).
    """

    name: str
    source: str
    created: int
    announced: tuple[ModelId, ...] = ()
    model_id: ModelId | None = None
    context_length: int | None = None
    served: ServedModel | None = None
    used_s: float = 0.0
    """When it was asked for last, by the monotonic clock."""
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def opened(self) -> bool:
        return self.served is not None

    @property
    def ids(self) -> tuple[ModelId, ...]:
        return self.announced if self.model_id is None else (self.model_id,)


class Models:
    """Models opened by name, and closed together.

    Those that are `given` are offered whatever the swarm does, and no others. Without any, those
    that are found in the swarm and might be opened here: they are fetched when they are asked for
    (`discovers`).
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
        self.discovers = not given
        self._cards = [
            Card(_last_part(name), name, int(time.time())) for name in dict.fromkeys(given)
        ]
        self._seen: dict[ModelId, Seen] | None = None
        self._looked = asyncio.Event()
        self._refused: dict[ModelId, tuple[float, str]] = {}
        """Until when they are not offered, and why."""
        self._fetching = asyncio.Lock()
        self._opening: set[asyncio.Task[ServedModel]] = set()

    def cards(self) -> Sequence[Card]:
        return tuple(self._cards)

    def card(self, name: str | None) -> Card:
        """By its name, source or id, or by the last part of its name where no other ends in that.

        None is the first that was given, or the only one that was found. Raises `Problem`.
        """
        found = self._named(name)
        if len(found) == 1:
            return found[0]
        offered = ", ".join(card.name for card in self._cards[:20]) or "none"
        shown = "any model" if name is None else f"`{name[:200]}`"
        reason = f"The model {shown} does not exist here; there are: {offered}"
        if why := self._why_not_offered(name):
            reason = f"The model {shown} is not offered here, though nodes serve it: {why}"
        if found:
            several = ", ".join(card.source for card in found[:20])
            reason = f"{shown} may be any of these, ask for one by its whole name: {several}"
        raise Problem(404, reason, code="model_not_found", param="model")

    def _why_not_offered(self, name: str | None) -> str | None:
        for model_id, (_, why) in self._refused.items():
            announced = model_id.rpartition("@")[0]
            names = (None, model_id, announced, _last_part(announced))
            if model_id in (self._seen or {}) and name in names:
                return why
        return None

    def _named(self, name: str | None) -> list[Card]:
        """Whom `name` may mean. A stranger's model may end in what another one is called: whole
        names go first, and what two end in is nobody's."""
        cards = self._cards
        if name is None:
            return cards[:1] if not self.discovers else cards
        whole = [card for card in cards if name in (card.name, card.source) or name in card.ids]
        return whole or [card for card in cards if _last_part(card.name) == name]

    async def get(self, name: str | None) -> ServedModel:
        """Opened now if it is not open. Raises `Problem` and `NesaError`."""
        card = self.card(name)
        card.used_s = time.monotonic()
        return await self._opened(card)

    async def _opened(self, card: Card) -> ServedModel:
        if card.served is not None:
            return card.served
        with waiting("the model to be opened for the first time"):
            # A client that goes meanwhile must not end what other requests wait for.
            task = asyncio.create_task(self._open_once(card), name="open-model")
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
            return await asyncio.shield(task)

    async def _open_once(self, card: Card) -> ServedModel:
        async with card.opening:
            if card.served is not None:
                return card.served
            served = await (self._fetch(card) if self.discovers else self._enter(card))
            self._look.know_blocks(served.model_id, served.num_blocks)
            card.model_id = served.model_id
            card.context_length = served.context_length
            card.served = served
            card.used_s = time.monotonic()
            if card not in self._cards:
                # It vanished, or was refused, while this request waited its turn.
                self._cards.append(card)
            log.info("model_opened", model=card.model_id, **told(served.defaults))
            return served

    async def _fetch(self, card: Card) -> ServedModel:
        """Open a discovered model: one at a time, since all share what they may take of the disk.

        One that cannot be opened is not offered for a while.
        """
        async with self._fetching:
            if sum(other.opened for other in self._cards) >= MAX_OPEN:
                await self._make_room()
            try:
                return await self._enter(card, frozenset(card.announced))
            except ModelError as error:
                self._refuse(card, error)
                raise

    async def _make_room(self) -> None:
        """Close a discovered model that is not in use. Raises `ResourceError` if all are."""
        card = least_wanted(self._cards, self._seen or {})
        if card is None or card.served is None:
            raise ResourceError(
                f"{MAX_OPEN} models are open here, which is the most, and answer requests; name "
                "those to serve with --model"
            )
        served, card.served = card.served, None
        log.info("model_closed", model=card.model_id)
        self._look.forget_blocks(served.model_id)
        if card.model_id in (self._seen or {}):
            # A look does not say again what is known of an open model.
            card.announced = tuple(dict.fromkeys((card.model_id, *card.announced)))
        card.model_id = None
        await served.close()

    async def _enter(self, card: Card, ids: frozenset[ModelId] | None = None) -> ServedModel:
        served = await self._open(card.source, ids)
        try:
            await served.join()
        except BaseException:
            await served.close()
            raise
        return served

    async def open_given(self) -> None:
        """Open those that were given, so that a wrong name is told before anybody asks."""
        for card in self._cards:
            model = await self._opened(card)
            # The checkpoint's own name: of a hub's model that is owner and name.
            card.name = model.name

    async def close(self) -> None:
        for task in list(self._opening):
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        for card in self._cards:
            if card.served is not None:
                await card.served.close()

    async def watch(self, model_id: ModelId) -> None:
        """Raises `MissingBlocksError` once it is known that blocks of the model are missing."""
        await watch_holes(self._look, model_id)

    def holes(self, card: Card) -> tuple[Span, ...] | None:
        """As the last look saw them; None if no node was seen, or nobody has looked."""
        found = [one for key in card.ids if (one := (self._seen or {}).get(key)) is not None]
        return found[0].holes if found else None

    async def keep_looking(self) -> None:
        """Look at the swarm every `look_every_s`; find models if none were given. Runs for ever."""
        async with asyncio.TaskGroup() as group:
            if self.discovers:
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
        if self.discovers:
            for card in self._cards:
                card.announced = tuple(key for key in card.announced if key in seen)
            # Whoever announces much must not keep others out for good.
            self._cards = [
                card
                for card in self._cards
                if card.served or card.opening.locked() or card.announced
            ]

    async def _keep_discovering(self) -> None:
        """Beside the looks: to read a folder may take long, and there may be many."""
        while True:
            await self._looked.wait()
            self._looked.clear()
            while (one := self._unknown()) is not None:
                await self._find(one)

    def _unknown(self) -> Seen | None:
        """A model that might be offered too: the one whose last try is longest ago, if any."""
        if len(self._cards) >= MAX_DISCOVERED:
            return None
        known = {key for card in self._cards for key in (*card.announced, card.model_id)}
        now = time.monotonic()
        tries = {
            model_id: self._refused.get(model_id, (0.0, ""))[0]
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
            self._refuse_id(model_id, error, _TRY_AGAIN_S)
            return
        self._refused.pop(model_id, None)
        for card in self._cards:
            if card.source == source:
                card.announced = (*card.announced, model_id)
                break
        else:
            self._cards.append(Card(one.model_name, source, int(time.time()), (model_id,)))
        log.info("model_found", model=model_id)

    def _refuse(self, card: Card, error: NesaError) -> None:
        for model_id in card.announced:
            self._refuse_id(model_id, error, _FETCH_AGAIN_S)
        self._cards = [other for other in self._cards if other is not card]

    def _refuse_id(self, model_id: ModelId, error: NesaError, for_s: float) -> None:
        if model_id not in self._refused:
            log.warning("model_not_offered", model=model_id, reason=str(error))
        if len(self._refused) >= _MAX_REFUSED:
            self._refused.clear()
        self._refused[model_id] = time.monotonic() + for_s, str(error)


def least_wanted(cards: Sequence[Card], seen: Container[ModelId]) -> Card | None:
    """The open model without a request that was used longest ago, of those that no node announces
    where there are any."""
    idle = [card for card in cards if card.served is not None and not card.served.running]
    return min(idle, key=lambda card: (card.model_id in seen, card.used_s), default=None)


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2] or name
