"""What this machine's device was measured to do, for its offer."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from nesa_node.core.logging import get_logger
from nesa_node.engine.kernels.threads import QUIET_SHARE, IdleCores
from nesa_node.engine.model.machine_figures import read_fresh_figures
from nesa_node.swarm.dht.pool_notices import MeasuredFigures
from nesa_node.swarm.p2p.tasks import stop_process

log = get_logger(__name__)

TIMEOUT_S = 120.0
END_TIMEOUT_S = 5.0
LOOK_INTERVAL_S = 3.0
"""Interval at which a machine looks whether other programs leave its cores alone; half to one and a
half times as long."""
MAX_FIRST_WAIT_S = 45.0
"""Longest wait for that before the first measurement: an offer has figures."""
QUIET_INTERVAL_S = 30.0
"""Least interval between measurements of a quiet machine, half to one and a half times as long."""
MAX_INTERVAL_S = 600.0
"""Longest interval between measurements of a machine that is never quiet while it is measured."""


class DeviceFigures:
    """Figures by kind of weights, of a machine that did little else while it was measured.

    The slowest of several measurements, each in a process of its own. Machines of one computer with
    the same threads share them in `cache_dir`.
    """

    def __init__(self, device: torch.device, threads: int | None, cache_dir: Path) -> None:
        """`threads`: None for all that are used by default."""
        self.kinds: Mapping[str, MeasuredFigures] = {}
        self._device, self._cache_dir = device, cache_dir
        self._threads = threads or torch.get_num_threads()
        self._argv: tuple[str, ...] = (
            *(sys.executable, "-m", "nesa_node.engine.model.machine_figures", str(device)),
            *("auto" if threads is None else str(threads), str(cache_dir)),
        )
        self._is_final, self._runs = False, 0
        self._ready = asyncio.Event()

    async def wait(self) -> None:
        """Wait for the first measurement, which may have failed."""
        await self._ready.wait()

    async def measure_first(self) -> None:
        """Measure once other programs leave the cores alone, or after `MAX_FIRST_WAIT_S`."""
        deadline, idle_cores = time.monotonic() + MAX_FIRST_WAIT_S, IdleCores()
        while not self._read_quiet() and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_INTERVAL_S * random.uniform(0.5, 1.5))
            if idle_cores.busy_share() <= QUIET_SHARE:
                break
        if not self._ready.is_set():
            await self._measure()

    async def measure_until_complete(self, is_free: Callable[[], bool]) -> None:
        """Measure again when `is_free()` and little else runs, until the figures are complete."""
        await self.wait()
        interval_s = LOOK_INTERVAL_S
        while not self._is_final:
            runs = self._runs
            await asyncio.sleep(interval_s * random.uniform(0.5, 1.5))
            idle_cores = IdleCores()
            await asyncio.sleep(LOOK_INTERVAL_S)
            self._read_quiet()
            # Not if another process has just measured.
            if self._runs == runs and is_free() and idle_cores.busy_share() <= QUIET_SHARE:
                await self._measure()
                interval_s = min(2 * interval_s, MAX_INTERVAL_S)
            if self._read_quiet():
                interval_s = QUIET_INTERVAL_S

    def _read_quiet(self) -> bool:
        """Take figures that were measured on this device while it was quiet, if there are any."""
        found = read_fresh_figures(self._device, self._threads, self._cache_dir)
        if found is None or not found.are_quiet:
            return False
        self.kinds = {kind: _as_offered(asdict(each)) for kind, each in found.kinds.items()}
        self._runs, self._is_final = found.runs, found.are_complete
        self._ready.set()
        return True

    async def _measure(self) -> None:
        """Measure. Keeps what was known if that fails."""
        log.info("machine_measured", reason="orchestrators plan by what this device is seen to do")
        process = await asyncio.create_subprocess_exec(
            *self._argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            # Ctrl-C in the terminal must reach only this process, which ends the other.
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                output, _ = await process.communicate()
            measured = json.loads(output)
            self.kinds = {kind: _as_offered(each) for kind, each in measured["kinds"].items()}
            self._is_final = measured["are_complete"]
        except (TimeoutError, ValueError) as error:
            log.warning("machine_not_measured", reason=str(error))
            self._is_final = True
        finally:
            self._ready.set()
            # It deletes its files.
            await stop_process(process, END_TIMEOUT_S)


def _as_offered(figures: Mapping[str, Any]) -> MeasuredFigures:
    return MeasuredFigures.model_validate(figures)
