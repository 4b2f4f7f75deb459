"""The plan of a session: signed, and on the DHT as long as the session lasts."""

from __future__ import annotations

import asyncio
import math
import time

from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import ModelId
from nesa_node.swarm.dht.training_notices import (
    MAX_LISTED_PLANS,
    TRAINING_TTL_S,
    SessionPlan,
    TrainingNotice,
)
from nesa_node.swarm.notice_store import NoticeStore


class AnnouncedPlan:
    """Announces one plan, in a notice with those of this client's other sessions."""

    def __init__(self, notices: NoticeStore, model_id: ModelId, plan: SessionPlan) -> None:
        self.digest = plan.digest
        self._notices = notices
        self._model_id = model_id
        self._plan = plan
        self._sealed = b""
        self._sealed_at = -math.inf
        self._turn = asyncio.Lock()

    async def seal(self) -> bytes:
        """The signed notice with the plan; a new one, which is announced, if it is half through.

        Raises `ConfigError` for too many sessions at once, and what `NoticeStore.announce` does.
        """
        async with self._turn:
            if time.monotonic() - self._sealed_at > TRAINING_TTL_S / 2:
                await self._announce((*self._other_plans(), self._plan))
            return self._sealed

    async def withdraw(self) -> None:
        """Announce the other sessions' plans alone."""
        if self._sealed:
            await self._announce(self._other_plans())

    def _other_plans(self) -> tuple[SessionPlan, ...]:
        own = self._notices.own_notice(TrainingNotice, self._model_id)
        return tuple(each for each in own.plans if each != self._plan) if own is not None else ()

    async def _announce(self, plans: tuple[SessionPlan, ...]) -> None:
        if len(plans) > MAX_LISTED_PLANS:
            raise ConfigError(
                f"{MAX_LISTED_PLANS} fine-tuning sessions of this model are open: close one first"
            )
        notice, self._sealed = self._notices.sign(
            TrainingNotice, self._model_id, ttl_s=TRAINING_TTL_S, plans=plans
        )
        self._sealed_at = time.monotonic()
        await self._notices.announce(notice, self._sealed)
