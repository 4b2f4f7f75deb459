"""What the operator of a machine allows of the models that an orchestrator assigns to it.

A refusal is a line that names the flag.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import datetime
from fnmatch import fnmatchcase
from statistics import fmean
from typing import Any

from nesa_node.core.errors import ConfigError, UnsupportedModelError
from nesa_node.core.settings.declaration import gib_to_bytes
from nesa_node.core.settings.models import NodeConfig
from nesa_node.engine.weights.families import FAMILIES, is_known_type
from nesa_node.server.pool.models import block_tensors, open_pool_model
from nesa_node.swarm.dht.pool_notices import AssignedSpan

GPU_WINDOW_S = 60.0
"""Time over which the use of the GPU by other programs is averaged."""


class OperatorTerms:
    """Decides about assignments by the settings `pool_*`, clocks and use of the GPU."""

    def __init__(
        self,
        config: NodeConfig,
        read_gpu_share: Callable[[], float] | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        local_time: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`read_gpu_share` returns the share, from 0 to 1, that other programs use of the GPU.

        It raises `OSError` where that is not known, and is needed with `pool_gpu_share` only.
        Raises `ConfigError` for a family that no node can serve.
        """
        unknown = [name for name in config.pool_families if not is_known_type(name)]
        if unknown:
            raise ConfigError(
                f"--pool-families {unknown[0]}: no such family; there are {', '.join(FAMILIES)}, "
                "and those of docs/models.md"
            )
        self._config = config
        self._read_gpu_share = read_gpu_share
        self._clock, self._local_time = clock, local_time
        self._loads: deque[float] = deque()
        self._gpu_shares: deque[tuple[float, float]] = deque()

    def offer_fields(self) -> dict[str, Any]:
        """The part of the offer by which orchestrators know what to assign in vain."""
        return {
            "models": self._config.pool_models,
            "families": self._config.pool_families,
            "max_download_bytes": gib_to_bytes(self._config.pool_max_download_gib),
            "quant_types": self._config.pool_quant_types,
        }

    def find_absence(self) -> str:
        """Why nothing may be held for now; empty where something may. Blocks for milliseconds."""
        hours = self._config.pool_hours
        if hours is not None and not _is_within(self._local_time().hour, *hours):
            return f"--pool-hours {hours[0]}-{hours[1]}"
        return self._find_gpu_absence()

    def _find_gpu_absence(self) -> str:
        allowed, read = self._config.pool_gpu_share, self._read_gpu_share
        if allowed is None or read is None:
            return ""
        now = self._clock()
        try:
            self._gpu_shares.append((now, read()))
        except OSError as error:
            return f"--pool-gpu-share: {error}"[:120]
        while self._gpu_shares[0][0] <= now - GPU_WINDOW_S:
            self._gpu_shares.popleft()
        share = fmean(share for _, share in self._gpu_shares)
        if share <= allowed:
            return ""
        return f"--pool-gpu-share {allowed:g}: other programs use {share:.2f} of the GPU"

    def find_refusal(self, span: AssignedSpan) -> str | None:
        """Why an assignment is refused by what it says; None where it is allowed."""
        config = self._config
        if not any(fnmatchcase(span.model, pattern) for pattern in config.pool_models):
            return f"--pool-models does not allow {span.model}"
        if span.quant_type not in config.pool_quant_types:
            return f"--pool-quant-types does not allow {span.quant_type}"
        now = self._clock()
        while self._loads and self._loads[0] <= now - 3600.0:
            self._loads.popleft()
        if len(self._loads) >= config.pool_loads_per_hour:
            return f"--pool-loads-per-hour: {config.pool_loads_per_hour} were loaded in this hour"
        return None

    def check_model(self, span: AssignedSpan) -> None:
        """Read the model's config and list of files where a setting needs them. Blocks the thread.

        Raises `UnsupportedModelError` for its family, `DiskLimitError` for its download, and as
        `open_pool_model` does.
        """
        config = self._config
        most = gib_to_bytes(config.pool_max_download_gib)
        if not config.pool_families and most is None:
            return
        checkpoint = open_pool_model(span.model, config, max_model_bytes=most)
        family = str(checkpoint.config.model_type)
        if config.pool_families and family not in config.pool_families:
            raise UnsupportedModelError(
                f"--pool-families does not allow {family}, the family of {span.model}"
            )
        if most is not None:
            checkpoint.require_download_allowed(block_tensors(checkpoint, span.blocks))

    def count_load(self) -> None:
        """Count a model that is loaded now, for `find_refusal`."""
        self._loads.append(self._clock())


def _is_within(hour: int, first: int, last: int) -> bool:
    """Whether an hour of the day lies in `first <= hour < last`, past midnight if reversed."""
    return first <= hour < last if first < last else hour >= first or hour < last
