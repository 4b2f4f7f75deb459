"""Adapters as their authors and users see them: publish, list, fetch, remove."""

from __future__ import annotations

import asyncio
import os
import random
import re
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Required, TypedDict, TypeVar, Unpack

from pydantic import ValidationError

from nesa_node.core.errors import (
    AdapterError,
    BusyError,
    ConfigError,
    PeerUnreachableError,
    ProtocolError,
    RecordError,
    SwarmError,
)
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.settings.declaration import default_identity_path
from nesa_node.engine.weights.adapter_files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_WEIGHTS_FILE,
    AdapterSummary,
    check_adapter_folder,
    check_fits,
    find_linear_layers,
    read_adapter_folder,
    read_metrics,
)
from nesa_node.engine.weights.checkpoint import open_folder
from nesa_node.swarm.adapter_catalog import PublishedAdapter, find_published, list_published
from nesa_node.swarm.adapter_transfer import AdapterPeer, find_holders
from nesa_node.swarm.dht.adapter_notices import (
    ADAPTER_MAX_TTL_S,
    ADAPTER_NAME_PATTERN,
    MAX_ADAPTER_BYTES,
    MAX_LISTED_ADAPTERS,
    AdapterNotice,
    ListedAdapter,
)
from nesa_node.swarm.dht.records import NodeRecord, filter_by_model
from nesa_node.swarm.node import Swarm, run_in_swarm
from nesa_node.swarm.p2p.identity import Identity

UPLOAD_COPIES = 4
"""Nodes to upload an adapter to; the rest fetch it from them when a session asks for it."""
_TTL_S = ADAPTER_MAX_TTL_S - 1.0

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class PublishedCopies:
    """A published adapter and the nodes that store it; `refusals` has other nodes' reasons."""

    adapter: PublishedAdapter
    nodes: tuple[PeerId, ...]
    refusals: Mapping[PeerId, str]


class AdapterClient:
    """Publishes an identity's adapters for one model, and fetches those of all authors."""

    def __init__(
        self,
        swarm: Swarm,
        model_id: ModelId,
        nodes: Mapping[PeerId, Sequence[str]],
        identity: Identity | None = None,
    ) -> None:
        """`nodes` are the addresses of the model's nodes. Without `identity`, which signs, nothing
        can be published or removed."""
        self.model_id = model_id
        self._swarm = swarm
        self._nodes = nodes
        self._identity = identity
        self._asking = AdapterPeer(swarm, model_id)

    @classmethod
    async def open(
        cls, swarm: Swarm, model: str, identity: Identity | None = None
    ) -> AdapterClient:
        """The client for the model that nodes serve under that name, folder or full id.

        Raises `SwarmError` where no node serves it, and `ConfigError` where the name is not
        enough.
        """
        records = list(filter_by_model(await swarm.directory.fetch_all(), model))
        if not records:
            raise SwarmError(
                f"no node serves {model} in this swarm; `nesa-node status` lists models"
            )
        model_id = _choose_model(records, model)
        nodes = {
            record.signer: record.addresses
            for record in records
            if record.model_id == model_id and record.signer != swarm.transport.peer_id
        }
        return cls(swarm, model_id, nodes, identity)

    async def published(self) -> tuple[PublishedAdapter, ...]:
        """All adapters that are published for the model, by name and author."""
        return list_published(await self._swarm.notices.fetch(AdapterNotice, self.model_id))

    async def find(self, text: str) -> PublishedAdapter:
        """The adapter that `name`, `author/name` or a digest means. Raises `AdapterError`."""
        return find_published(await self.published(), text)

    async def fetch(self, adapter: PublishedAdapter, output: Path) -> Path:
        """Fetch an adapter into the new folder `output`, checked, as PEFT reads it.

        Raises `ConfigError` if `output` exists, and `AdapterError` if no node sends the adapter.
        """
        if await asyncio.to_thread(os.path.lexists, output):
            raise ConfigError(f"{output} exists; give another folder (--output)")
        holders = await find_holders(self._asking, self._nodes, adapter.digest)
        reason = f"none of {len(self._nodes)} nodes of the model has it now"
        await asyncio.to_thread(output.parent.mkdir, parents=True, exist_ok=True)
        for peer, addresses in holders.items():
            with tempfile.TemporaryDirectory(prefix=".adapter-", dir=output.parent) as scratch:
                folder = Path(scratch) / "adapter"
                folder.mkdir()
                try:
                    await self._asking.get(
                        peer,
                        addresses,
                        adapter.digest,
                        adapter.listed.nbytes,
                        config=folder / ADAPTER_CONFIG_FILE,
                        weights=folder / ADAPTER_WEIGHTS_FILE,
                    )
                    await asyncio.to_thread(check_adapter_folder, folder, adapter.digest)
                except (PeerUnreachableError, ProtocolError, AdapterError) as error:
                    reason = str(error)
                    continue
                await asyncio.to_thread(folder.rename, output)
                return output
        raise AdapterError(f"{adapter.name} cannot be fetched: {reason}")

    async def publish(
        self,
        folder: Path,
        *,
        name: str | None = None,
        description: str = "",
        metrics: Mapping[str, float] | None = None,
        base: Path | None = None,
    ) -> PublishedCopies:
        """Upload a PEFT folder to nodes of the model, and announce it for 30 days.

        `name` is by default the folder's, and `metrics` those that `nesa-node finetune` wrote
        there. An adapter of this identity with the same name is
        replaced. `base` is a folder of the model, whose layers the adapter must fit. Raises
        `AdapterError` for a folder that cannot be published, `ConfigError` for a name or text that
        is out of bounds, and `SwarmError` where no node stores it.
        """
        folder = await asyncio.to_thread(folder.resolve)
        base_name = self.model_id.rpartition("@")[0]
        summary = await asyncio.to_thread(read_adapter_folder, folder, base_name)
        if summary.nbytes > MAX_ADAPTER_BYTES:
            raise AdapterError(
                f"{folder} has {summary.nbytes >> 20} MiB; at most {MAX_ADAPTER_BYTES >> 20} are "
                "published: save it in bfloat16, or train a lower rank"
            )
        if base is not None:
            await asyncio.to_thread(_check_base, folder, base)
        if metrics is None:
            metrics = await asyncio.to_thread(read_metrics, folder)
        listed = _list_adapter(summary, _choose_name(name, folder), description, metrics)
        others = [each for each in await self._own_adapters() if each.name != listed.name]
        if len(others) >= MAX_LISTED_ADAPTERS:
            raise ConfigError(
                f"{MAX_LISTED_ADAPTERS} adapters of this identity are published for this model "
                "already; `nesa-node adapters remove` one"
            )
        notice, sealed = self._sign([*others, listed])
        nodes, refusals = await self._upload(summary, folder / ADAPTER_WEIGHTS_FILE, sealed)
        if not nodes:
            words = "; ".join(sorted(set(refusals.values()))[:3]) or "the model has no node now"
            raise SwarmError(f"no node stores {listed.name}: {words}")
        await self._announce(notice, sealed)
        adapter = PublishedAdapter(self.model_id, notice.signer, listed, notice.expires_at)
        return PublishedCopies(adapter, nodes, refusals)

    async def remove(self, name: str) -> None:
        """Withdraw this identity's adapter; nodes delete it within minutes.

        Raises `AdapterError` where this identity has none of that name, and `SwarmError` where the
        DHT does not take the notice.
        """
        own = await self._own_adapters()
        others = [each for each in own if each.name != name]
        if len(others) == len(own):
            raise AdapterError(
                f"{name!r:.200}: not published for this model by this identity "
                f"({self._author.peer_id})"
            )
        await self._announce(*self._sign(others))

    @property
    def _author(self) -> Identity:
        assert self._identity is not None, "this client has no identity to sign with"
        return self._identity

    async def _own_adapters(self) -> list[ListedAdapter]:
        """What this identity has published so far; remembers its newest notice."""
        author = self._author.peer_id
        found = await self._swarm.notices.fetch(AdapterNotice, self.model_id)
        own = [each for each in found if each.peer_id == author]
        return list(own[0].adapters) if own else []

    def _sign(self, adapters: Sequence[ListedAdapter]) -> tuple[AdapterNotice, bytes]:
        """Raises `ConfigError` where the texts of all adapters together are too long."""
        notices = self._swarm.notices.signed_by(self._author)
        try:
            return notices.sign(
                AdapterNotice, self.model_id, ttl_s=_TTL_S, adapters=tuple(adapters)
            )
        except RecordError as error:
            raise ConfigError(
                f"{error} ({len(adapters)} adapters): give shorter descriptions, or remove one"
            ) from None

    async def _announce(self, notice: AdapterNotice, sealed: bytes) -> None:
        failure = await self._swarm.notices.announce(notice, sealed)
        if failure is not None:
            raise SwarmError(f"no member of the DHT took the notice ({failure}); try again later")

    async def _upload(
        self, summary: AdapterSummary, weights: Path, sealed: bytes
    ) -> tuple[tuple[PeerId, ...], dict[PeerId, str]]:
        """Upload to nodes in random order until `UPLOAD_COPIES` have stored it.

        Returns them, and the reasons of nodes that did not.
        """
        stored: list[PeerId] = []
        refusals: dict[PeerId, str] = {}
        for peer in random.sample(sorted(self._nodes), len(self._nodes)):
            if len(stored) == UPLOAD_COPIES:
                break
            try:
                await self._asking.put(
                    peer,
                    self._nodes[peer],
                    digest=summary.digest,
                    notice=sealed,
                    config=summary.config,
                    weights=weights,
                )
            except BusyError as error:
                refusals[peer] = f"{error} (retry in {error.retry_after_s:.0f} s)"
            except (PeerUnreachableError, ProtocolError) as error:
                refusals[peer] = str(error)
            else:
                stored.append(peer)
        return tuple(stored), refusals


def _choose_model(records: Sequence[NodeRecord], model: str) -> ModelId:
    """The model id that a name means. Raises `ConfigError` where several copies are served."""
    found = sorted({record.model_id for record in records})
    if model in found:
        return ModelId(model)
    if len(found) > 1:
        raise ConfigError(f"several models are served as {model}: give one of {', '.join(found)}")
    return ModelId(found[0])


def _choose_name(name: str | None, folder: Path) -> str:
    """The given name, or one made of the folder's. Raises `ConfigError`."""
    chosen = name
    if chosen is None:
        chosen = re.sub(r"[^a-z0-9._-]+", "-", folder.name.lower()).lstrip("._-")[:64]
    if re.fullmatch(ADAPTER_NAME_PATTERN.strip("^$"), chosen) is None:
        raise ConfigError(
            f"--name {chosen!r:.100}: 1 to 64 of the characters a-z, 0-9, '.', '_' and '-', the "
            "first a letter or digit"
        )
    return chosen


def _check_base(folder: Path, base: Path) -> None:
    """Raise `AdapterError` unless an adapter fits the model in folder `base`."""
    check_fits(folder, find_linear_layers(open_folder(base)))


def _list_adapter(
    summary: AdapterSummary, name: str, description: str, metrics: Mapping[str, float]
) -> ListedAdapter:
    """Raises `ConfigError` that names the field."""
    try:
        return ListedAdapter(
            name=name,
            digest=summary.digest,
            nbytes=summary.nbytes,
            rank=summary.rank,
            target_modules=summary.target_modules,
            metrics={key: float(value) for key, value in metrics.items()},
            created_at=time.time(),
            description=description,
        )
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{where}: {first['msg']} ({first['input']!r:.140})") from None


class SwarmAccess(TypedDict, total=False):
    """How the functions below join a swarm: `identity_path` is the key file that signs notices, by
    default this user's; `swarm_key` that of a private swarm.
    """

    initial_peers: Required[Sequence[str]]
    identity_path: Path | None
    swarm_key: str | None


def publish_adapter(
    model: str,
    folder: Path | str,
    *,
    name: str | None = None,
    description: str = "",
    metrics: Mapping[str, float] | None = None,
    **access: Unpack[SwarmAccess],
) -> PublishedCopies:
    """Publish a PEFT folder for a model, as `nesa-node adapters publish`. Blocks the thread.

    Raises `AdapterError` for a folder that cannot be published, `SwarmError` where no node stores
    it, `ConfigError`, and `BootstrapError` if no initial peer answers, as the functions below do.
    """

    async def work(client: AdapterClient) -> PublishedCopies:
        return await client.publish(
            Path(folder), name=name, description=description, metrics=metrics
        )

    return _use_swarm(model, work, **access)


def list_adapters(model: str, **access: Unpack[SwarmAccess]) -> tuple[PublishedAdapter, ...]:
    """The adapters that are published for a model. Blocks the thread."""
    return _use_swarm(model, lambda client: client.published(), **access)


def fetch_adapter(model: str, name: str, output: Path | str, **access: Unpack[SwarmAccess]) -> Path:
    """Fetch an adapter, `name` or `author/name`, into a new folder. Blocks the thread.

    Raises `AdapterError` where there is none, or no node sends it.
    """

    async def work(client: AdapterClient) -> Path:
        return await client.fetch(await client.find(name), Path(output))

    return _use_swarm(model, work, **access)


def remove_adapter(model: str, name: str, **access: Unpack[SwarmAccess]) -> None:
    """Withdraw this identity's adapter. Blocks the thread. Raises `AdapterError` if it has none."""
    _use_swarm(model, lambda client: client.remove(name), **access)


def _use_swarm(
    model: str,
    work: Callable[[AdapterClient], Coroutine[Any, Any, _Result]],
    *,
    initial_peers: Sequence[str],
    identity_path: Path | None = None,
    swarm_key: str | None = None,
) -> _Result:
    """Join through `initial_peers`, and run `work` there."""
    identity = Identity.load_or_create(identity_path or default_identity_path())

    async def run(swarm: Swarm) -> _Result:
        return await work(await AdapterClient.open(swarm, model, identity))

    return run_in_swarm(run, initial_peers=initial_peers, swarm_key=swarm_key)
