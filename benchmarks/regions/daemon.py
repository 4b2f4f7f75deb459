"""`nesa-node run`, for which `--block-indices` is only where it begins.

    python -m benchmarks.regions.daemon [--boast FACTOR] [--slow SECONDS] run MODEL ...

The command is the program's own, and so is all that it does; but a span that was given does not
pin the node. With `--boast` it claims so many times the speed that it has measured, with `--slow`
every step takes so much longer, before and after it measures.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nesa_node.cli.app import run_command
from nesa_node.core.settings.models import NodeConfig
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.model.devices import SpanThroughput, measure_throughput
from nesa_node.server.node import daemon, served_span, span_speed
from nesa_node.server.node.move_limiter import MoveLimiter
from nesa_node.server.scheduler.scheduler import DecodeTimes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--boast", type=float, default=1.0)
    parser.add_argument("--slow", type=float, default=0.0)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    unpin()
    if arguments.slow:
        slow_down(arguments.slow)
    if arguments.boast != 1.0:
        boast(arguments.boast)
    sys.exit(run_command(arguments.command))


def unpin() -> None:
    def moves_of(config: NodeConfig) -> MoveLimiter:
        return MoveLimiter(per_hour=config.max_moves_per_hour, pause_s=config.move_pause_s)

    daemon.make_move_limiter = moves_of


def slow_down(by_s: float) -> None:
    patched: Any = ModelBlocks
    for name in ("forward", "forward_buffers"):
        setattr(patched, name, _later(getattr(patched, name), by_s))


def _later(computes: Callable[..., Any], by_s: float) -> Callable[..., Any]:
    def slowly(*arguments: Any, **named: Any) -> Any:
        time.sleep(by_s)
        return computes(*arguments, **named)

    return slowly


def boast(factor: float) -> None:
    def measure(blocks: ModelBlocks, **options: Any) -> SpanThroughput:
        true = measure_throughput(blocks, **options)
        return replace(
            true,
            prefill_tokens_per_s=factor * true.prefill_tokens_per_s,
            decode_tokens_per_s=factor * true.decode_tokens_per_s,
        )

    for module in (served_span, span_speed):
        patched: Any = module
        patched.measure_throughput = measure
    # Nor does such a node tell what its steps took.
    served: Any = DecodeTimes
    served.take_mean_s = lambda *_: None


if __name__ == "__main__":
    main()
