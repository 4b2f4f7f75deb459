"""Disk usage of the local hub cache, and eviction of repositories."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from nesa_node.core.errors import DiskLimitError


def require_room(
    cache_dir: Path, needed: int, *, limit: int | None, model: str, evicts: bool
) -> None:
    """Raises `DiskLimitError` where `needed` more bytes do not fit under `cache_dir`.

    With `evicts`, repositories other than `model` are removed as far as `limit` requires, the least
    recently used first.
    """
    if not needed:
        return
    cache_dir.mkdir(parents=True, exist_ok=True)
    if limit is not None:
        used = size_of(cache_dir)
        if evicts:
            used -= _evict(cache_dir, used + needed - limit, keep=repository_folder(model))
        if used + needed > limit:
            raise DiskLimitError(
                f"{model} needs {_gib(needed)} more, {cache_dir} holds {_gib(used)} and may hold "
                f"{_gib(limit)}; raise the disk limit, take fewer blocks or clear that folder"
            )
    free = shutil.disk_usage(cache_dir).free
    if needed > free:
        raise DiskLimitError(f"{model} needs {_gib(needed)}, {cache_dir} has {_gib(free)} left")


def touch(cache_dir: Path, model: str) -> None:
    """Mark a repository as used now."""
    os.utime(cache_dir / repository_folder(model))


def repository_folder(model: str) -> str:
    """Return huggingface_hub's folder name of a repository."""
    return "models--" + model.replace("/", "--")


def size_of(folder: Path) -> int:
    """Return the bytes of the files in `folder`, without links."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_symlink())


def _evict(cache_dir: Path, excess: int, *, keep: str) -> int:
    """Remove repositories until `excess` bytes are freed; none if removing all would not suffice.

    Returns the bytes freed.
    """
    found = [path for path in cache_dir.glob("models--*") if path.is_dir() and path.name != keep]
    sizes = {path: size_of(path) for path in found}
    if sum(sizes.values()) < excess:
        return 0
    freed = 0
    for path in sorted(found, key=lambda path: path.stat().st_mtime):
        if freed >= excess:
            break
        shutil.rmtree(path)
        freed += sizes[path]
    return freed


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB"
