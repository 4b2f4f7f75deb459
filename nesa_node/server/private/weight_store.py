"""Encoded weights: in memory as far as they fit, and in a file beyond that."""

from __future__ import annotations

import mmap
import shutil
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np

from nesa_node.core.errors import DiskLimitError
from nesa_node.privacy.ring import Residues


class WeightStore:
    """Keeps arrays of up to `memory_bytes` in memory, and maps further ones from a file.

    The file has no name: it goes with the arrays, also where the process is killed. Products read
    all of the weights in turn, so that a cache of the latest would never hold the next: what is in
    memory stays there, and the system's own cache of files holds what it can of the rest.
    """

    def __init__(self, folder: Path, memory_bytes: int, file_bytes: int) -> None:
        """Raises `DiskLimitError` where `folder` has not so much space, and `OSError`."""
        self._folder, self._free = folder, memory_bytes
        self.mapped_bytes = 0
        """Bytes of the arrays that are in the file."""
        if not file_bytes:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(folder).free) < file_bytes:
            raise DiskLimitError(
                f"{folder} has {free >> 20} MiB free, of {file_bytes >> 20} MiB of encoded weights "
                "that do not fit into memory: serve fewer blocks (--num-blocks), raise "
                "--private-cache-gib, or free space there"
            )

    def keep(self, values: Residues) -> Residues:
        """Return the same values, in memory or mapped. Raises `OSError`."""
        if values.nbytes <= self._free:
            self._free -= values.nbytes
            return values
        with TemporaryFile(dir=self._folder) as file:
            file.write(np.ascontiguousarray(values).data)
            file.flush()
            memory = mmap.mmap(file.fileno(), values.nbytes, access=mmap.ACCESS_READ)
        self.mapped_bytes += values.nbytes
        return np.frombuffer(memory, values.dtype).reshape(values.shape)
