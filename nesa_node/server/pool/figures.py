"""What this machine's device was measured to do, for its offer."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from nesa_node.core.logging import get_logger
from nesa_node.engine.kernels.threads import QUIET_SHARE, IdleCores
from nesa_node.swarm.dht.pool_notices import MeasuredFigures

log = get_logger(__name__)

TIMEOUT_S = 120.0
AGAIN_INTERVAL_S = 20.0
"""Interval at which a machine that was busy during its measurement is looked at; half to one and a
half times as long, so that several on one computer do not disturb each other."""


class DeviceFigures:
    """Figures by kind of weights: measured at once, and again when a busy machine becomes quiet."""

    def __init__(self, device: str, threads: int | None, cache_dir: Path) -> None:
        """`threads`: None for all that are used by default."""
        self.kinds: Mapping[str, MeasuredFigures] = {}
        self._argv: tuple[str, ...] = (
            *(sys.executable, "-m", "nesa_node.engine.model.machine_figures", device),
            *("auto" if threads is None else str(threads), str(cache_dir)),
        )
        self._is_final = False
        self._ready = asyncio.Event()

    async def wait(self) -> None:
        """Wait for the first measurement, which may have failed."""
        await self._ready.wait()

    async def measure(self) -> None:
        """Measure, or read an earlier measurement of a quiet machine. Keeps what was known if that
        fails.
        """
        log.info("machine_measured", reason="orchestrators plan by what this device is seen to do")
        process = await asyncio.create_subprocess_exec(
            *self._argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                output, _ = await process.communicate()
            measured = json.loads(output)
            self.kinds = {kind: MeasuredFigures(**each) for kind, each in measured["kinds"].items()}
            self._is_final = measured["are_quiet"]
        except (TimeoutError, ValueError) as error:
            log.warning("machine_not_measured", reason=str(error))
            self._is_final = True
        finally:
            self._ready.set()
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def measure_until_quiet(self, is_free: Callable[[], bool]) -> None:
        """Measure again when `is_free()` and little else runs, until that was so throughout."""
        await self.wait()
        while not self._is_final:
            idle_cores = IdleCores()
            await asyncio.sleep(AGAIN_INTERVAL_S * random.uniform(0.5, 1.5))
            if is_free() and idle_cores.busy_share() <= QUIET_SHARE:
                await self.measure()
