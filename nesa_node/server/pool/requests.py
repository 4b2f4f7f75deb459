"""Requests for swarms, as clients make them, and the pool as clients see it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Required, TypedDict, TypeVar, Unpack

from pydantic import ValidationError

from nesa_node.core.errors import ConfigError, SwarmError
from nesa_node.core.settings.choices import PlacementGoal, WeightQuality
from nesa_node.core.settings.declaration import default_identity_path
from nesa_node.swarm.dht.pool_notices import (
    MAX_WANTED_SWARMS,
    POOL,
    REQUEST_MAX_TTL_S,
    BuildRequest,
    Offer,
    PoolStatus,
    SwarmStatus,
    WantedSwarm,
)
from nesa_node.swarm.node import Swarm, run_in_swarm
from nesa_node.swarm.notice_store import NoticeStore
from nesa_node.swarm.p2p.identity import Identity

_MIN_TTL_S = 60.0
POLL_INTERVAL_S = 1.0
DEFAULT_HOURS = 168.0
_HOUR_S = 3600.0
_Result = TypeVar("_Result")


def status_line(status: SwarmStatus) -> str:
    """A line for people: state, replicas, machines, prediction, reason."""
    words = f"{status.model}: {status.state}, {status.replicas} of {status.wanted} replicas"
    words += f" on {status.machines} machines" if status.machines != 1 else " on 1 machine"
    if status.predicted_tokens_per_s:
        words += f", {status.predicted_tokens_per_s:.1f} tokens/s predicted"
    return f"{words}; {status.reason}" if status.reason else words


@dataclass(frozen=True, slots=True)
class PoolView:
    """What clients know of a pool: orchestrators' statuses, newest first, and offers."""

    statuses: tuple[PoolStatus, ...]
    offers: tuple[Offer, ...]

    @property
    def swarms(self) -> tuple[SwarmStatus, ...]:
        return tuple(each for status in self.statuses for each in status.swarms)

    def of_model(self, model: str) -> PoolView:
        """The part that concerns a model. Raises `SwarmError` where it was not asked for."""
        statuses = tuple(
            status.model_copy(
                update={"swarms": tuple(each for each in status.swarms if each.model == model)}
            )
            for status in self.statuses
        )
        offers = tuple(
            offer for offer in self.offers if any(each.model == model for each in offer.held)
        )
        view = PoolView(statuses, offers)
        if not view.swarms and not offers:
            raise SwarmError(f"{model}: no such swarm was asked for; `nesa-node swarm list`")
        return view

    def as_json(self) -> dict[str, Any]:
        return {
            "swarms": [each.model_dump(mode="json") for each in self.swarms],
            "machines": [
                {"peer_id": offer.peer_id}
                | offer.model_dump(
                    mode="json", exclude={"model_id", "peer_id", "epoch", "seq", "issued_at"}
                )
                for offer in self.offers
            ],
        }


async def read_pool(notices: NoticeStore) -> PoolView:
    offers = await notices.fetch(Offer, POOL)
    statuses = await _read_statuses(notices)
    return PoolView(tuple(statuses), tuple(sorted(offers, key=lambda each: each.peer_id)))


async def _read_statuses(notices: NoticeStore) -> list[PoolStatus]:
    """The orchestrators' statuses, newest first."""
    found = await notices.fetch(PoolStatus, POOL)
    return sorted(found, key=lambda each: -each.issued_at)


class PoolClient:
    """Publishes what an identity wants, and reads what became of it."""

    def __init__(self, notices: NoticeStore, identity: Identity) -> None:
        self._reader = notices
        self._notices = notices.signed_by(identity)
        self._identity = identity

    async def request(
        self,
        model: str,
        *,
        replicas: int = 1,
        max_replicas: int | None = None,
        quality: WeightQuality = "exact",
        goal: PlacementGoal = "latency",
        until: float,
    ) -> None:
        """Ask for a swarm, in place of this identity's earlier request for the model.

        `until` is in seconds since the epoch. Raises `SwarmError` where no orchestrator would read
        it, `ConfigError` for what cannot be asked for, and where too many are.
        """
        wanted = _wanted_swarm(
            model=model,
            replicas=replicas,
            max_replicas=max_replicas or replicas,
            quality=quality,
            goal=goal,
            until=until,
        )
        await self._require_permission()
        others = [each for each in await self._wanted() if each.model != model]
        if len(others) >= MAX_WANTED_SWARMS:
            raise ConfigError(
                f"{MAX_WANTED_SWARMS} swarms are asked for already; `nesa-node swarm remove` one"
            )
        await self._publish([*others, wanted])

    async def scale(self, model: str, replicas: int, max_replicas: int) -> None:
        """Change the replicas of a swarm. Raises `SwarmError` where it was not asked for, and
        `ConfigError` for a number that cannot be.
        """
        await self._require_permission()
        wanted = await self._wanted()
        if all(each.model != model for each in wanted):
            raise SwarmError(self._not_asked(model))
        change = {"replicas": replicas, "max_replicas": max_replicas}
        await self._publish(
            [
                _wanted_swarm(**each.model_dump() | change) if each.model == model else each
                for each in wanted
            ]
        )

    async def remove(self, model: str) -> None:
        """Withdraw the request for a model. Raises `SwarmError` where there is none."""
        await self._require_permission()
        wanted = await self._wanted()
        if all(each.model != model for each in wanted):
            raise SwarmError(self._not_asked(model))
        await self._publish([each for each in wanted if each.model != model])

    async def status(self, model: str) -> SwarmStatus | None:
        """What the orchestrators say of a model; None where none has read the request yet."""
        swarms = PoolView(tuple(await self._statuses()), ()).swarms
        return next((each for each in swarms if each.model == model), None)

    async def wait_until_serving(
        self, model: str, wait_s: float, tell: Callable[[str], None] = lambda _: None
    ) -> SwarmStatus | None:
        """Wait until a swarm serves, at most `wait_s`; `tell` gets a line for each change of state.

        None if time is up. A request that is refused is withdrawn, and raises `SwarmError`.
        """
        deadline, told = time.monotonic() + wait_s, ""
        while True:
            status = await self.status(model)
            waiting = f"{model}: waiting for an orchestrator"
            text = waiting if status is None else status_line(status)
            if text != told:
                tell(text)
                told = text
            if status is not None and status.state == "serving":
                return status
            if status is not None and status.state == "refused":
                await self.remove(model)
                raise SwarmError(f"{model} is not built: {status.reason}")
            if time.monotonic() >= deadline:
                return None
            await asyncio.sleep(POLL_INTERVAL_S)

    async def view(self) -> PoolView:
        return await read_pool(self._reader)

    async def _statuses(self) -> list[PoolStatus]:
        return await _read_statuses(self._reader)

    async def _require_permission(self) -> None:
        """Raise `SwarmError` where no orchestrator builds, or none does for this identity."""
        statuses = await self._statuses()
        if not statuses:
            raise SwarmError(
                "no orchestrator builds swarms here; start one with `nesa-node orchestrate`"
            )
        own = self._identity.peer_id
        if not any(own in status.creators for status in statuses):
            raise SwarmError(
                f"the orchestrator {statuses[0].peer_id} does not build for this identity; its "
                f"operator can allow it: --allow-creators {own}"
            )

    async def _wanted(self) -> list[WantedSwarm]:
        """What this identity has asked for so far."""
        found = await self._reader.fetch(BuildRequest, POOL)
        own = next((each for each in found if each.peer_id == self._identity.peer_id), None)
        now = time.time()
        return [] if own is None else [each for each in own.swarms if each.until > now]

    async def _publish(self, wanted: list[WantedSwarm]) -> None:
        last = max((each.until for each in wanted), default=0.0)
        ttl_s = min(max(last - time.time(), _MIN_TTL_S), REQUEST_MAX_TTL_S - 1)
        await self._notices.publish(BuildRequest, POOL, ttl_s=ttl_s, swarms=tuple(wanted))

    def _not_asked(self, model: str) -> str:
        return f"{model}: not asked for by this identity ({self._identity.peer_id})"


def _wanted_swarm(**fields: Any) -> WantedSwarm:
    """Raises `ConfigError` that names the field."""
    try:
        return WantedSwarm(**fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "replicas"
        raise ConfigError(f"{where}: {first['msg']} ({first['input']!r:.140})") from None


class PoolMembership(TypedDict, total=False):
    """How the functions below join a pool: `identity_path` is the key file that signs requests, by
    default this user's; `swarm_key` that of a private swarm.
    """

    initial_peers: Required[Sequence[str]]
    identity_path: Path | None
    swarm_key: str | None


def create_swarm(
    model: str,
    *,
    replicas: int = 1,
    max_replicas: int | None = None,
    quality: WeightQuality = "exact",
    goal: PlacementGoal = "latency",
    hours: float = DEFAULT_HOURS,
    wait_s: float = 600.0,
    **membership: Unpack[PoolMembership],
) -> SwarmStatus | None:
    """Ask a pool's orchestrator for a swarm, and wait until it serves, as `nesa-node swarm create`.

    Blocks the thread, at most about `wait_s`; None if the swarm does not serve by then. Raises
    `SwarmError` for a request that is refused, `ConfigError` for one that cannot be made, and
    `BootstrapError` if no initial peer answers, as the functions below do.
    """

    async def work(pool: PoolClient) -> SwarmStatus | None:
        await pool.request(
            model,
            replicas=replicas,
            max_replicas=max_replicas,
            quality=quality,
            goal=goal,
            until=time.time() + hours * _HOUR_S,
        )
        return await pool.wait_until_serving(model, wait_s)

    return _use_pool(work, **membership)


def list_swarms(**membership: Unpack[PoolMembership]) -> tuple[SwarmStatus, ...]:
    """The swarms that were asked for, and what became of them. Blocks the thread."""

    async def work(pool: PoolClient) -> tuple[SwarmStatus, ...]:
        return (await pool.view()).swarms

    return _use_pool(work, **membership)


def show_swarm(model: str, **membership: Unpack[PoolMembership]) -> PoolView:
    """A swarm's status, and the offers of the machines that hold it. Blocks the thread.

    Raises `SwarmError` where it was not asked for.
    """

    async def work(pool: PoolClient) -> PoolView:
        return (await pool.view()).of_model(model)

    return _use_pool(work, **membership)


def scale_swarm(
    model: str,
    replicas: int,
    max_replicas: int | None = None,
    **membership: Unpack[PoolMembership],
) -> None:
    """Change the replicas that this identity wants of a swarm. Blocks the thread.

    Raises `SwarmError` where it was not asked for.
    """
    _use_pool(lambda pool: pool.scale(model, replicas, max_replicas or replicas), **membership)


def remove_swarm(model: str, **membership: Unpack[PoolMembership]) -> None:
    """Withdraw this identity's request for a swarm. Blocks the thread.

    Raises `SwarmError` where it was not asked for.
    """
    _use_pool(lambda pool: pool.remove(model), **membership)


def _use_pool(
    work: Callable[[PoolClient], Coroutine[Any, Any, _Result]],
    *,
    initial_peers: Sequence[str],
    identity_path: Path | None = None,
    swarm_key: str | None = None,
) -> _Result:
    """Join through `initial_peers`, and run `work` there."""
    identity = Identity.load_or_create(identity_path or default_identity_path())

    async def run(swarm: Swarm) -> _Result:
        return await work(PoolClient(swarm.notices, identity))

    return run_in_swarm(run, initial_peers=initial_peers, swarm_key=swarm_key)
