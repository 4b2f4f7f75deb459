"""What only the owner of a private deployment knows: which member holds which blocks."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from filelock import FileLock
from msgspec import Meta

from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.swarm.protocol.messages import BlockRange
from nesa_node.swarm.protocol.shard_messages import ShardId

_LOCK_TIMEOUT_S = 600.0


class PlacedShard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A shard on a member."""

    peer: PeerId
    id: ShardId


class Split(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Consecutive blocks, and the shards with them: as many as check each other."""

    blocks: BlockRange
    shards: tuple[PlacedShard, ...]

    @property
    def span(self) -> Span:
        return Span(*self.blocks)


class Deployment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model's private deployment."""

    version: Literal[1] = 1
    model: ModelId
    dtype: Literal["float32", "bfloat16", "float16"]
    cache_tokens: Annotated[int, Meta(ge=1)]
    """Of each shard."""
    client_blocks: tuple[int, int]
    """First and last blocks that the owner computes."""
    members: dict[PeerId, tuple[str, ...]]
    """Addresses of all members, those without a shard too: these are spares."""
    barred: dict[PeerId, str] = {}
    """Members that are not used any more, and why."""
    left: tuple[PlacedShard, ...] = ()
    """Shards that no place has any more, and that their members may still hold."""
    identity_path: str | None = None
    """Key file by which members know the owner."""
    splits: tuple[Split, ...]

    @property
    def span(self) -> Span:
        """The blocks that members hold."""
        return Span(self.splits[0].blocks[0], self.splits[-1].blocks[1])

    @property
    def verifiers(self) -> int:
        """Members that compute each block."""
        return len(self.splits[0].shards)

    @property
    def spares(self) -> tuple[PeerId, ...]:
        """Members without a shard that may be used."""
        holding = {shard.peer for shard in self.shards}
        return tuple(
            peer for peer in self.members if peer not in holding and peer not in self.barred
        )

    def shard(self, split: int, replica: int) -> PlacedShard:
        return self.splits[split].shards[replica]

    @property
    def shards(self) -> tuple[PlacedShard, ...]:
        """Those of all places."""
        return tuple(shard for split in self.splits for shard in split.shards)

    def with_barred(self, peer: PeerId, reason: str) -> Deployment:
        return msgspec.structs.replace(self, barred={**self.barred, peer: reason})

    def without_left(self, shard: PlacedShard) -> Deployment:
        """Without a shard that its member does not hold any more."""
        left = tuple(each for each in self.left if each != shard)
        return msgspec.structs.replace(self, left=left)

    def with_shard(self, split: int, replica: int, shard: PlacedShard) -> Deployment:
        """With another shard in this place; the one before is left."""
        splits = list(self.splits)
        shards = list(splits[split].shards)
        left = (*self.left, shards[replica])
        shards[replica] = shard
        splits[split] = msgspec.structs.replace(splits[split], shards=tuple(shards))
        return msgspec.structs.replace(self, splits=tuple(splits), left=left)


def already_there(path: Path) -> ConfigError:
    return ConfigError(
        f"there is a deployment at {path}: --withdraw ends it, or give another --file"
    )


class DeploymentFile:
    """A deployment's file, which clients and commands of one owner change at the same time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Deployment:
        """Raises `ConfigError` for a file that is missing or none of a deployment."""
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"there is no deployment at {self.path} ({error.strerror}): `nesa-node deploy` "
                "makes one"
            ) from error
        try:
            deployment = msgspec.json.decode(data, type=Deployment)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.path} is no deployment: {error}") from error
        if not deployment.splits or not all(split.shards for split in deployment.splits):
            raise ConfigError(f"{self.path} is a deployment without shards")
        return deployment

    def create(self, deployment: Deployment) -> None:
        """Raises `ConfigError` where a file is there."""
        with self.locked():
            if self.path.exists():
                raise already_there(self.path)
            self._write(deployment)

    def update(self, change: Callable[[Deployment], Deployment]) -> Deployment:
        """Replace what the file has by what `change` makes of it. Blocks the thread."""
        with self.locked():
            deployment = change(self.read())
            self._write(deployment)
        return deployment

    def take(self) -> Deployment:
        """Delete the file, and return what it had: no client sends a shard from then on."""
        with self.locked():
            deployment = self.read()
            self.path.unlink()
        for lock in self.path.parent.glob(f"{self.path.name}*.lock"):
            with suppress(OSError):
                lock.unlink()
        return deployment

    def locked(self) -> FileLock:
        """A lock of this file, for one process and thread at a time."""
        return self._make_lock("")

    def place_lock(self, place: str) -> FileLock:
        """A lock for the replacement of a place's member."""
        return self._make_lock(f".{place}")

    def _make_lock(self, suffix: str) -> FileLock:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        path = self.path.with_name(f"{self.path.name}{suffix}.lock")
        return FileLock(path, timeout=_LOCK_TIMEOUT_S, thread_local=False)

    def _write(self, deployment: Deployment) -> None:
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            with os.fdopen(
                os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb"
            ) as out:
                out.write(msgspec.json.format(msgspec.json.encode(deployment), indent=2) + b"\n")
            draft.replace(self.path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise ConfigError(f"cannot write {self.path}: {error.strerror}") from error
