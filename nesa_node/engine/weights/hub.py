"""Models on the Hugging Face hub: download of the files that are needed, checked by hash.

Disk usage of the local hub cache, and eviction of repositories.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.errors import HTTPError as HubConnectionError  # type: ignore[attr-defined]
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
    get_session,
    hf_raise_for_status,
)
from huggingface_hub.utils.tqdm import tqdm as hub_tqdm
from transformers import PreTrainedConfig

from nesa_node.core.errors import (
    ConfigError,
    CorruptCheckpointError,
    DiskLimitError,
    ModelNotFoundError,
)
from nesa_node.core.logging import get_logger
from nesa_node.core.wait_tracking import track_wait
from nesa_node.engine.weights.checkpoint import Checkpoint, list_weight_files, open_folder
from nesa_node.engine.weights.families import read_config
from nesa_node.engine.weights.files import (
    INDEX_FILE,
    MAX_SIDE_FILE_BYTES,
    Progress,
    TensorInfo,
    check_size,
    parse_header,
    read_header,
)


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
        used = compute_folder_bytes(cache_dir)
        if evicts:
            used -= _evict(cache_dir, used + needed - limit, keep=get_repository_folder(model))
        if used + needed > limit:
            raise DiskLimitError(
                f"{model} needs {_format_gib(needed)} more, {cache_dir} holds "
                f"{_format_gib(used)} and may hold {_format_gib(limit)}; raise the disk limit, "
                "take fewer blocks or clear that folder"
            )
    free = shutil.disk_usage(cache_dir).free
    if needed > free:
        raise DiskLimitError(
            f"{model} needs {_format_gib(needed)}, {cache_dir} has {_format_gib(free)} left"
        )


def mark_used(cache_dir: Path, model: str) -> None:
    """Mark a repository as used now."""
    os.utime(cache_dir / get_repository_folder(model))


def get_repository_folder(model: str) -> str:
    """Return huggingface_hub's folder name of a repository."""
    return "models--" + model.replace("/", "--")


def compute_folder_bytes(folder: Path) -> int:
    """Return the bytes of the files in `folder`, without links."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_symlink())


def _evict(cache_dir: Path, excess: int, *, keep: str) -> int:
    """Remove repositories until `excess` bytes are freed; none if removing all would not suffice.

    Returns the bytes freed.
    """
    found = [path for path in cache_dir.glob("models--*") if path.is_dir() and path.name != keep]
    sizes = {path: compute_folder_bytes(path) for path in found}
    if sum(sizes.values()) < excess:
        return 0
    freed = 0
    for path in sorted(found, key=lambda path: path.stat().st_mtime):
        if freed >= excess:
            break
        shutil.rmtree(path)
        freed += sizes[path]
    return freed


def _format_gib(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB"


log = get_logger(__name__)

MAX_TENSORS = 1_000_000
_MAX_PARALLEL_HEADERS = 4
_HEADER_READ_BYTES = 100_000
"""Longer than most headers, so that they need no second request."""
_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file in a repository. `digest` is SHA-256 for a large (LFS) file, else git's SHA-1."""

    name: str
    size: int
    digest: str
    is_lfs: bool


class HubRepository:
    """One commit of a repository, and its files in the local cache."""

    def __init__(
        self,
        api: HfApi,
        name: str,
        commit: str,
        files: Mapping[str, HubFile],
        *,
        max_disk_bytes: int | None,
        evicts: bool,
    ) -> None:
        """`open_hub` explains `max_disk_bytes` and `evicts`."""
        self.api = api
        self.name = name
        self.commit = commit
        self.files = files
        self._max_disk_bytes = max_disk_bytes
        self._evicts = evicts

    def download(
        self, names: Iterable[str], cache_dir: Path, *, progress: Progress | None = None
    ) -> Path:
        """Download missing files, verify all, and return their folder. Blocks the thread.

        Raises `DiskLimitError` and `CorruptCheckpointError` before downloading files for which
        there is no room, or side files that are too large; the latter also for a hash that differs
        from the hub's.
        """
        with track_wait("files of the model from the hub"):
            return self._download(names, cache_dir, progress)

    def _download(self, names: Iterable[str], cache_dir: Path, progress: Progress | None) -> Path:
        files = [self.files[name] for name in names]
        for file in files:
            if file.name in MAX_SIDE_FILE_BYTES:
                check_size(file.name, file.size, where=self.name)
        missing = [file for file in files if not self._is_cached(file, cache_dir)]
        needed = sum(file.size for file in missing)
        require_room(
            cache_dir, needed, limit=self._max_disk_bytes, model=self.name, evicts=self._evicts
        )
        done, total = 0, sum(file.size for file in missing)
        folder = cache_dir
        for file in files:
            bar = _make_bar_class(progress, f"downloading {self.name}", done, total)
            with _convert_hub_errors(self.name):
                path = self.api.hf_hub_download(
                    self.name,
                    file.name,
                    revision=self.commit,
                    cache_dir=cache_dir,
                    tqdm_class=bar,
                )
            mark_used(cache_dir, self.name)
            _verify(Path(path), file)
            folder = Path(path).parent
            done += file.size if file in missing else 0
        return folder

    def read_headers(self, names: Iterable[str]) -> dict[str, TensorInfo]:
        """Return the tensors of safetensors files, downloading only their headers."""
        tensors: dict[str, TensorInfo] = {}
        with _convert_hub_errors(self.name), ThreadPoolExecutor(_MAX_PARALLEL_HEADERS) as pool:
            for part in pool.map(self._read_header, names):
                tensors.update(part)
                if len(tensors) > MAX_TENSORS:
                    raise CorruptCheckpointError(f"{self.name} has over {MAX_TENSORS} tensors")
        return tensors

    def _read_header(self, name: str) -> dict[str, TensorInfo]:
        beginning = self._read_range(name, 0, _HEADER_READ_BYTES)

        def read(start: int, count: int) -> bytes:
            if start + count <= len(beginning):
                return beginning[start : start + count]
            return self._read_range(name, start, count)

        return parse_header(
            read, self.files[name].size, name, where=f"{name} of {self.name} on the hub"
        )

    def _read_range(self, name: str, start: int, count: int) -> bytes:
        url = hf_hub_url(self.name, name, revision=self.commit, endpoint=self.api.endpoint)
        headers = build_hf_headers(token=self.api.token)
        headers["Range"] = f"bytes={start}-{start + count - 1}"
        response = get_session().get(url, headers=headers, timeout=_TIMEOUT_S)
        hf_raise_for_status(response)
        content: bytes = response.content
        return content[:count]

    def _is_cached(self, file: HubFile, cache_dir: Path) -> bool:
        found = try_to_load_from_cache(
            self.name, file.name, cache_dir=cache_dir, revision=self.commit
        )
        return isinstance(found, str)


_HUB_NAME_PATTERN = re.compile(r"[\w.-]+(/[\w.-]+)?")


class HubCheckpoint(Checkpoint):
    def __init__(
        self,
        repository: HubRepository,
        folder: Path,
        config: PreTrainedConfig,
        tensors: dict[str, TensorInfo],
        *,
        cache_dir: Path,
    ) -> None:
        super().__init__(repository.name, folder, config, tensors)
        self._repository = repository
        self._mutable_tensors = tensors
        self._cache_dir = cache_dir
        self._fetched_files: set[str] = set()

    @property
    def commit(self) -> str:
        """The commit that the revision resolved to on opening; all files are read from it."""
        return self._repository.commit

    def fetch(self, names: Iterable[str], progress: Progress | None = None) -> None:
        files = sorted({self.tensors[name].file for name in names} - self._fetched_files)
        if not files:
            return
        self._repository.download(files, self._cache_dir, progress=progress)
        for file in files:
            self._mutable_tensors.update(read_header(self.folder / file, file))
        self._fetched_files.update(files)

    def fetch_side_files(self) -> Path:
        wanted = [name for name in MAX_SIDE_FILE_BYTES if name in self._repository.files]
        return self._repository.download(wanted, self._cache_dir)

    def tensor_digests(self) -> Mapping[str, str]:
        files = {info.file for info in self.tensors.values()}
        return {file: self._repository.files[file].digest for file in files}


def open_checkpoint(
    model: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: Path,
    max_disk_bytes: int | None = None,
    evicts: bool = False,
    endpoint: str | None = None,
) -> Checkpoint:
    """Open a local folder, or a hub repository by name (its config and headers only).

    Blocks the thread. `open_hub` explains how the cache under `cache_dir` is bounded. Raises
    `ModelNotFoundError`, `UnsupportedModelError`, `UnsafeCheckpointError`,
    `CorruptCheckpointError`, `DiskLimitError`, and `ConfigError` for a revision of a folder.
    """
    folder = Path(os.path.expanduser(model))
    if folder.is_dir():
        if revision is not None:
            raise ConfigError(f"a revision names a version on the hub; {folder} is a local folder")
        return open_folder(folder)
    if folder.exists() or not _HUB_NAME_PATTERN.fullmatch(model) or model.startswith("."):
        raise ModelNotFoundError(
            f"{model} is no folder; give a folder with config.json and *.safetensors, "
            "or a name on the hub such as HuggingFaceTB/SmolLM2-135M-Instruct"
        )
    return open_hub(
        model,
        revision=revision,
        token=token,
        cache_dir=cache_dir,
        max_disk_bytes=max_disk_bytes,
        evicts=evicts,
        endpoint=endpoint,
    )


def open_hub(
    model: str,
    *,
    revision: str | None,
    token: str | None,
    cache_dir: Path,
    max_disk_bytes: int | None,
    evicts: bool = False,
    endpoint: str | None = None,
) -> HubCheckpoint:
    """Open a hub repository by name: its config and the headers of its weight files.

    Blocks the thread. At most `max_disk_bytes` are kept under `cache_dir`. With `evicts` the least
    recently used repositories are removed to make room; without, `DiskLimitError` is raised. Raises
    as `open_checkpoint` does.
    """
    api = HfApi(endpoint=endpoint, token=token)
    repository = _find_repository(
        api, model, revision, max_disk_bytes=max_disk_bytes, evicts=evicts
    )
    cache_dir = cache_dir / "hub"
    small = [name for name in ("config.json", INDEX_FILE) if name in repository.files]
    if "config.json" not in small:
        raise ModelNotFoundError(
            f"{model} on the hub has no config.json; it is no transformers model"
        )
    folder = repository.download(small, cache_dir)
    config = read_config(folder, name=model)
    tensors = repository.read_headers(list_weight_files(set(repository.files), folder, name=model))
    return HubCheckpoint(repository, folder, config, tensors, cache_dir=cache_dir)


def _find_repository(
    api: HfApi, model: str, revision: str | None, *, max_disk_bytes: int | None, evicts: bool
) -> HubRepository:
    with _convert_hub_errors(model), track_wait("the hub's list of files", limit_s=_TIMEOUT_S):
        info = api.model_info(model, revision=revision, files_metadata=True, timeout=_TIMEOUT_S)
    files = {}
    for sibling in info.siblings or ():
        digest = sibling.lfs.sha256 if sibling.lfs else sibling.blob_id
        size: object = sibling.size
        if digest is not None and size is not None:
            if not isinstance(size, int) or size < 0:
                raise CorruptCheckpointError(
                    f"the hub's list of files of {model} gives {sibling.rfilename!r} a size "
                    "that is no number of bytes"
                )
            files[sibling.rfilename] = HubFile(
                sibling.rfilename, size, digest, is_lfs=sibling.lfs is not None
            )
    if info.sha is None:
        raise ModelNotFoundError(f"the hub names no commit for {model}")
    return HubRepository(api, model, info.sha, files, max_disk_bytes=max_disk_bytes, evicts=evicts)


def _verify(path: Path, file: HubFile) -> None:
    """Compare a file with the hub's hash; a file that differs is removed."""
    with path.open("rb") as stream:
        if file.is_lfs:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        else:
            # A git blob; the hub states only its SHA-1 for small files.
            content = stream.read(file.size + 1)
            blob = b"blob %d\0" % len(content) + content
            digest = hashlib.sha1(blob, usedforsecurity=False).hexdigest()
    if digest != file.digest:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise CorruptCheckpointError(
            f"{file.name} is not what the hub states (its hash is {digest[:16]}, expected "
            f"{file.digest[:16]}); it was removed, start again to download it anew"
        )


@contextmanager
def _convert_hub_errors(model: str) -> Iterator[None]:
    """Converts errors of the hub and the network to those of `open_checkpoint`."""
    try:
        yield
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"{model} is gated: accept its terms on the hub, then pass --token or set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"{model} is neither a folder here nor a model on the hub; a private one needs --token"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelNotFoundError(f"{model} on the hub has no such revision") from error
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{model} on the hub: {error}") from error
    except (LookupError, TypeError, AttributeError) as error:
        # huggingface_hub does not validate responses.
        raise CorruptCheckpointError(
            f"{model} on the hub has an unexpected description: {error!r}"
        ) from error
    except (HfHubHTTPError, HubConnectionError, OSError) as error:
        raise ModelNotFoundError(
            f"{model} is no folder here, and the hub does not answer ({error}); give a local folder"
        ) from error


def _make_bar_class(progress: Progress | None, task: str, before: int, total: int) -> Any:
    """Return a class with huggingface_hub's progress-bar interface that reports to `progress`."""
    base: Any = hub_tqdm

    class Bar(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            self.seen = before + int(options.get("initial") or 0)
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self.seen += int(n or 0)
            if progress is not None:
                progress(task, self.seen, total)

    return Bar
