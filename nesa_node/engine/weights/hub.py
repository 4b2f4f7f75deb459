"""Models on the Hugging Face hub: download of the files needed, checked by hash, into a cache."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
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
from nesa_node.core.ids import is_model_name
from nesa_node.core.logging import get_logger
from nesa_node.core.wait_tracking import track_wait
from nesa_node.engine.gguf.checkpoint import GGUF_SUFFIX, find_gguf, open_gguf, open_local
from nesa_node.engine.gguf.header import part_paths
from nesa_node.engine.weights.checkpoint import Checkpoint, ReadConfig, find_weights, read_format
from nesa_node.engine.weights.families import read_network_config
from nesa_node.engine.weights.files import (
    DIFFUSION_INDEX_FILE,
    INDEX_FILE,
    MAX_SIDE_FILE_BYTES,
    Progress,
    TensorInfo,
    check_size,
    parse_header,
    read_header,
)
from nesa_node.engine.weights.formats.stored_format import StoredFormat
from nesa_node.engine.weights.language_models import read_language_config
from nesa_node.engine.weights.pipeline_folder import (
    PIPELINE_INDEX,
    is_pipeline,
    read_pipeline_index,
)

log = get_logger(__name__)


ADAPTERS_FOLDER = "adapters"
"""Folder beside the downloads for adapters that peers publish, which has a limit of its own."""


def compute_folder_bytes(folder: Path) -> int:
    """Return the bytes of the files in `folder`, without links."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_symlink())


def _format_gib(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB"


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


@dataclass(frozen=True, slots=True)
class HubRepository:
    """One commit of a repository, and its files in the local cache.

    `open_hub` explains `max_disk_bytes`, `evicts` and `max_model_bytes`.
    """

    api: HfApi
    name: str
    commit: str
    files: Mapping[str, HubFile]
    cache_dir: Path
    max_disk_bytes: int | None
    evicts: bool
    max_model_bytes: int | None = None

    def download(self, names: Iterable[str], *, progress: Progress | None = None) -> Path:
        """Download missing files, verify all, and return their folder. Blocks the thread.

        Raises `DiskLimitError` and `CorruptCheckpointError` before downloading files for which
        there is no room, or side files that are too large; the latter also for a hash that differs
        from the hub's.
        """
        with track_wait("files of the model from the hub"):
            return self._download([self.files[name] for name in names], progress)

    def _download(self, files: Sequence[HubFile], progress: Progress | None) -> Path:
        cache = self.cache_dir
        for file in files:
            if (base := PurePosixPath(file.name).name) in MAX_SIDE_FILE_BYTES:
                check_size(base, file.size, where=self.name)
        missing = self._missing(files)
        total = sum(file.size for file in missing)
        if total:
            self._require_room(total)
        done, folder = 0, cache
        for file in files:
            bar = _make_bar_class(progress, f"downloading {self.name}", done, total)
            with _convert_hub_errors(self.name):
                path = self.api.hf_hub_download(
                    self.name, file.name, revision=self.commit, cache_dir=cache, tqdm_class=bar
                )
            os.utime(cache / self._folder_name)  # used now, as `_evict` orders them
            _verify(Path(path), file)
            folder = Path(path).parents[file.name.count("/")]
            done += file.size if file in missing else 0
        return folder

    def _missing(self, files: Iterable[HubFile]) -> list[HubFile]:
        """The files that are not in the cache."""
        return [
            file
            for file in files
            if not isinstance(
                try_to_load_from_cache(self.name, file.name, self.cache_dir, self.commit), str
            )
        ]

    def require_allowed(self, names: Iterable[str]) -> None:
        """Raise `DiskLimitError` if these files bring the model above `max_model_bytes`.

        Files that are there already are always allowed.
        """
        needed = sum(file.size for file in self._missing(self.files[name] for name in names))
        if self.max_model_bytes is None or not needed:
            return
        needed += compute_folder_bytes(self.cache_dir / self._folder_name)
        if needed > self.max_model_bytes:
            raise DiskLimitError(
                f"--pool-max-download-gib: files of {self.name} would take {_format_gib(needed)}, "
                f"{_format_gib(self.max_model_bytes)} are allowed"
            )

    def _require_room(self, needed: int) -> None:
        """Evict as far as the limit requires. Raises `DiskLimitError` without room."""
        self.cache_dir.mkdir(parents=True, exist_ok=True)
        limit = self.max_disk_bytes
        if limit is not None:
            used = sum(
                compute_folder_bytes(path) if path.is_dir() else path.stat().st_size
                for path in self.cache_dir.iterdir()
                if path.name != ADAPTERS_FOLDER and not path.is_symlink()
            )
            if self.evicts:
                used -= self._evict(used + needed - limit)
            if used + needed > limit:
                raise DiskLimitError(
                    f"{self.name} needs {_format_gib(needed)} more, {self.cache_dir} holds "
                    f"{_format_gib(used)} and may hold {_format_gib(limit)}; raise the disk limit, "
                    "take fewer blocks or clear that folder"
                )
        free = shutil.disk_usage(self.cache_dir).free
        if needed > free:
            raise DiskLimitError(
                f"{self.name} needs {_format_gib(needed)}, {self.cache_dir} has "
                f"{_format_gib(free)} left"
            )

    def _evict(self, excess: int) -> int:
        """Remove other repositories until `excess` bytes are freed, the least recently used first.

        Returns the bytes freed: none if removing all would not suffice.
        """
        found = [path for path in self.cache_dir.glob("models--*") if path.is_dir()]
        sizes = {
            path: compute_folder_bytes(path)
            for path in sorted(found, key=lambda path: path.stat().st_mtime)
            if path.name != self._folder_name
        }
        if sum(sizes.values()) < excess:
            return 0
        freed = 0
        for path, size in sizes.items():
            if freed >= excess:
                break
            shutil.rmtree(path)
            freed += size
        return freed

    @property
    def _folder_name(self) -> str:
        """The name that huggingface_hub gives to a repository's folder."""
        return "models--" + self.name.replace("/", "--")

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


_HUB_NAME_PATTERN = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_FILE_PATTERN = re.compile(r"(?P<name>\w[\w.-]*/[\w.-]+):(?P<file>\w[\w.-]*\.gguf)")


class HubCheckpoint(Checkpoint):
    def __init__(
        self,
        repository: HubRepository,
        folder: Path,
        config: PreTrainedConfig,
        stored: dict[str, TensorInfo],
        stored_format: StoredFormat | None = None,
    ) -> None:
        super().__init__(repository.name, folder, config, stored, stored_format)
        self._repository = repository
        self._fetched_files: set[str] = set()

    def fetch(self, names: Iterable[str], progress: Progress | None = None) -> None:
        files = sorted(self._find_files(names) - self._fetched_files)
        if not files:
            return
        self._repository.require_allowed(files)
        self._repository.download(files, progress=progress)
        for file in files:
            prefix = "" if "/" not in file else f"{PurePosixPath(file).parent}."
            found = read_header(self.folder / file, file)
            self.stored |= {prefix + name: info for name, info in found.items()}
        self._map_tensors()
        self._fetched_files.update(files)

    def download_sizes(self, names: Iterable[str]) -> Mapping[str, int]:
        return {file: self._repository.files[file].size for file in self._find_files(names)}

    def require_download_allowed(self, names: Iterable[str]) -> None:
        self._repository.require_allowed(self._find_files(names))

    def fetch_side_files(self) -> Path:
        return self._repository.download(_side_files(self._repository.files, self.folder))

    def tensor_digests(self) -> Mapping[str, str]:
        files = {info.file for info in self.stored.values()}
        return {file: self._repository.files[file].digest for file in files}


def open_checkpoint(
    model: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: Path,
    max_disk_bytes: int | None = None,
    evicts: bool = False,
    max_model_bytes: int | None = None,
    endpoint: str | None = None,
    read: ReadConfig = read_language_config,
) -> Checkpoint:
    """Open a local folder or GGUF file, without a `revision` the folder of that name under
    `cache_dir`, or a hub repository by name (its config and headers only).

    `OWNER/NAME:FILE.gguf` names a GGUF file of a repository, which is downloaded whole. Blocks the
    thread. `open_hub` explains how the cache under `cache_dir` is bounded. Raises
    `ModelNotFoundError`, `UnsupportedModelError`, `UnsafeCheckpointError`,
    `CorruptCheckpointError`, `DiskLimitError`, and `ConfigError` for a revision of a folder.
    """
    if (found := _find_local(model, revision, cache_dir)) is not None:
        return open_local(found, cache_dir, read)
    if match := _HUB_FILE_PATTERN.fullmatch(model):
        repository = _open_repository(
            HfApi(endpoint=endpoint, token=token),
            match["name"],
            revision,
            cache_dir,
            max_disk_bytes,
            evicts,
            max_model_bytes,
            needs_config=False,
        )
        return open_gguf(_download_gguf(repository, match["file"]), cache_dir, read)
    try:
        return open_hub(
            model,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            max_disk_bytes=max_disk_bytes,
            evicts=evicts,
            max_model_bytes=max_model_bytes,
            endpoint=endpoint,
            read=read,
        )
    except ModelNotFoundError as error:
        last_part = model.rpartition("/")[2]
        if find_cached_folder(last_part, cache_dir) is None:
            raise
        raise ModelNotFoundError(
            f"{error}; {last_part} lies in {cache_dir}: use that name"
        ) from error


def fetch_config(model: str, *, cache_dir: Path) -> Path:
    """The folder of a model's `config.json`, or a pipeline's several, found as `open_checkpoint`
    does.

    Of a repository on the hub nothing but these files is downloaded. Blocks the thread. Raises
    `ModelNotFoundError`, `CorruptCheckpointError`, `UnsupportedModelError` and `DiskLimitError`.
    """
    if (found := _find_local(model, None, cache_dir)) is not None:
        # Of a GGUF file, the folder to which its config is written.
        return found if found.is_dir() else open_gguf(found, cache_dir, read_network_config).folder
    repository = _open_repository(HfApi(), model, None, cache_dir)
    files = repository.files
    folder = repository.download([name for name in _FIRST_FILES[:2] if name in files])
    if is_pipeline(folder):
        parts = read_pipeline_index(folder, name=model, present=files).parts
        repository.download(f"{part}/config.json" for part in parts)
    return folder


def _find_local(model: str, revision: str | None, cache_dir: Path) -> Path | None:
    """The local folder or GGUF file that `model` names; None for a name on the hub.

    Of a folder without a config that holds one GGUF file, that file.
    """
    path = Path(os.path.expanduser(model))
    if revision is None and not path.exists():
        path = find_cached_folder(model, cache_dir) or path
    if (file := find_gguf(path)) is not None or path.is_dir():
        if revision is not None:
            raise ConfigError(f"a revision names a version on the hub; {path} is local")
        return file or path
    if _HUB_FILE_PATTERN.fullmatch(model):
        return None
    if path.suffix == GGUF_SUFFIX and not path.exists():
        raise ModelNotFoundError(f"there is no file {path}; of the hub: OWNER/NAME:FILE.gguf")
    if path.exists() or not _HUB_NAME_PATTERN.fullmatch(model) or model.startswith("."):
        raise ModelNotFoundError(
            f"{model} is no folder; give a folder with config.json and *.safetensors, a GGUF file, "
            "or a name on the hub such as HuggingFaceTB/SmolLM2-135M-Instruct"
        )
    return None


def _download_gguf(repository: HubRepository, name: str) -> Path:
    """Download a GGUF file of a repository, with the further parts of a split one. Blocks.

    Raises `ModelNotFoundError` where there is none, and as `HubRepository.download` does.
    """
    names = [path.name for path in part_paths(Path(name))]
    if missing := [each for each in names if each not in repository.files]:
        there = sorted(each for each in repository.files if each.endswith(GGUF_SUFFIX))
        raise ModelNotFoundError(
            f"{repository.name} on the hub has no {missing[0]}; its GGUF files: "
            f"{', '.join(there[:20]) or 'none'}"
        )
    repository.require_allowed(names)
    return repository.download(names) / names[0]


def find_cached_folder(name: str, cache_dir: Path) -> Path | None:
    """The folder under `cache_dir` that has the model's name; None without, and for a path."""
    folder = cache_dir / name
    if not is_model_name(name):
        return None
    has_model = (folder / "config.json").is_file() or is_pipeline(folder)
    return folder if has_model or find_gguf(folder) is not None else None


def open_hub(
    model: str,
    *,
    revision: str | None,
    token: str | None,
    cache_dir: Path,
    max_disk_bytes: int | None,
    evicts: bool = False,
    max_model_bytes: int | None = None,
    endpoint: str | None = None,
    read: ReadConfig = read_language_config,
) -> HubCheckpoint:
    """Open a hub repository by name: its config and the headers of its weight files.

    Blocks the thread. At most `max_disk_bytes` are kept under `cache_dir`. With `evicts` the least
    recently used repositories are removed to make room; without, `DiskLimitError` is raised. A
    download that brings this model's files above `max_model_bytes` raises it, too. Raises as
    `open_checkpoint` does.
    """
    api = HfApi(endpoint=endpoint, token=token)
    repository = _open_repository(
        api, model, revision, cache_dir, max_disk_bytes, evicts, max_model_bytes
    )
    files = repository.files
    folder = repository.download(name for name in _FIRST_FILES if name in files)
    if is_pipeline(folder):
        parts = read_pipeline_index(folder, name=model, present=files).parts
        first = (f"{part}/{name}" for part in parts for name in _FIRST_FILES)
        repository.download(name for name in first if name in files)
    config = read(folder, name=model)
    tensors: dict[str, TensorInfo] = {}
    for prefix, names in find_weights(set(files), folder, name=model).items():
        tensors |= {prefix + key: info for key, info in repository.read_headers(names).items()}
    return HubCheckpoint(repository, folder, config, tensors, read_format(folder, name=model))


_FIRST_FILES = ("config.json", PIPELINE_INDEX, INDEX_FILE, DIFFUSION_INDEX_FILE)
"""What tells which other files there are."""


def _side_files(files: Iterable[str], folder: Path) -> list[str]:
    """The side files of a repository, of a pipeline also those of its components."""
    folders = {""}
    if is_pipeline(folder):
        folders |= {f"{key}/" for key in read_pipeline_index(folder, name="").components}
    wanted = {prefix + name for prefix in folders for name in MAX_SIDE_FILE_BYTES}
    return [name for name in files if name in wanted]


def _open_repository(
    api: HfApi,
    model: str,
    revision: str | None,
    cache_dir: Path,
    max_disk_bytes: int | None = None,
    evicts: bool = False,
    max_model_bytes: int | None = None,
    *,
    needs_config: bool = True,
) -> HubRepository:
    commit, files = _find_files(api, model, revision)
    if needs_config and "config.json" not in files and PIPELINE_INDEX not in files:
        if ggufs := sorted(name for name in files if name.endswith(GGUF_SUFFIX)):
            raise ModelNotFoundError(
                f"{model} on the hub has no config.json, but GGUF files: name one, such as "
                f"{model}:{ggufs[0]}"
            )
        raise ModelNotFoundError(
            f"{model} on the hub has neither config.json nor {PIPELINE_INDEX}; it is no model of "
            "transformers or diffusers"
        )
    return HubRepository(
        api, model, commit, files, cache_dir / "hub", max_disk_bytes, evicts, max_model_bytes
    )


def _find_files(api: HfApi, model: str, revision: str | None) -> tuple[str, dict[str, HubFile]]:
    """Return the commit of a revision, and its files by name."""
    with _convert_hub_errors(model), track_wait("the hub's list of files", limit_s=_TIMEOUT_S):
        info = api.model_info(model, revision=revision, files_metadata=True, timeout=_TIMEOUT_S)
    files = {}
    for sibling in info.siblings or ():
        name, is_lfs = sibling.rfilename, sibling.lfs is not None
        digest = sibling.lfs.sha256 if sibling.lfs else sibling.blob_id
        size: object = sibling.size
        if digest is not None and size is not None:
            if not isinstance(size, int) or size < 0:
                raise CorruptCheckpointError(
                    f"the hub's list of files of {model} gives {name!r} a size "
                    "that is no number of bytes"
                )
            files[name] = HubFile(name, size, digest, is_lfs)
    if info.sha is None:
        raise ModelNotFoundError(f"the hub names no commit for {model}")
    return info.sha, files


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
