"""Metadata of a GGUF file, with their types checked."""

from __future__ import annotations

import math
from typing import Any

from nesa_node.core.errors import CorruptCheckpointError, UnsupportedModelError
from nesa_node.engine.gguf.architectures import ARCHITECTURES
from nesa_node.engine.gguf.header import GgufHeader, GgufTensor

MAX_SIZE = (1 << 31) - 1


class MetadataFields:
    """Typed access to the metadata of a file's architecture, whose name their keys begin with."""

    def __init__(self, header: GgufHeader) -> None:
        """Raises `UnsupportedModelError` for an architecture that is not served, and
        `CorruptCheckpointError` without one.
        """
        self.header = header
        found = header.metadata.get("general.architecture")
        if not isinstance(found, str):
            raise CorruptCheckpointError(f"{header.path} states no general.architecture")
        if found not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"{header.name} is a GGUF file of {found[:40]!r}, which cannot be read; "
                f"these can: {', '.join(ARCHITECTURES)}"
            )
        self.architecture = ARCHITECTURES[found]
        kind = header.metadata.get("general.type", "model")
        if kind != "model":
            raise UnsupportedModelError(f"{header.name} is a GGUF file of type {kind!r:.40}")

    def listed(self, key: str) -> Any:
        """A value as it stands."""
        return self.header.metadata.get(f"{self.architecture.name}.{key}")

    def value(self, key: str) -> Any:
        """A value, or what a list repeats for each block; None where it is not stated.

        Raises `UnsupportedModelError` where blocks differ.
        """
        found = self.listed(key)
        if not isinstance(found, list):
            return found
        if not found or any(item != found[0] for item in found):
            raise self.refusal(f"states another {key} for each block")
        return found[0]

    def refusal(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.header.name} {reason}, which cannot be served")

    def mistake(self, key: str, found: object) -> CorruptCheckpointError:
        said = "is missing" if found is None else f"is {found!r:.40}"
        return CorruptCheckpointError(
            f"{self.header.path}: {self.architecture.name}.{key} {said}, which no model has"
        )

    def size(self, key: str) -> int:
        """A positive integer. Raises `CorruptCheckpointError` for anything else, or nothing."""
        found = self.value(key)
        if type(found) is not int or not 0 < found <= MAX_SIZE:
            raise self.mistake(key, found)
        return found

    def optional_size(self, key: str) -> int | None:
        """A size, or None where it is not stated, or 0, as llama.cpp's converter writes it."""
        return None if self.value(key) in (None, 0) else self.size(key)

    def number(self, key: str) -> float | None:
        """A finite number, or None. Raises `CorruptCheckpointError` for anything else."""
        found = self.value(key)
        if found is None:
            return None
        if type(found) not in (int, float) or not math.isfinite(found):
            raise self.mistake(key, found)
        return float(found)

    def positive(self, key: str) -> float | None:
        found = self.number(key)
        if found is not None and not found > 0:
            raise self.mistake(key, found)
        return found

    def has_tensor(self, name: str) -> bool:
        return name in self.header.tensors

    def tensor(self, name: str, dimensions: int) -> GgufTensor:
        """Raises `CorruptCheckpointError` where there is none of so many dimensions."""
        found = self.header.tensors.get(name)
        if found is None or len(found.shape) != dimensions:
            raise CorruptCheckpointError(
                f"{self.header.path} has no {name} of {dimensions} dimensions"
            )
        return found
