"""Run as a program: a daemon that moves where a line of its input tells it to.

The arguments are a `NodeConfig` as JSON. For every line `a:b` it prints what became of the wish and
the memory that is the process's own then, in bytes.
"""

from __future__ import annotations

import asyncio
import json
import sys

import psutil

from nesa_node.core.ids import Span
from nesa_node.core.settings.models import NodeConfig
from nesa_node.server.node.daemon import serve_node
from nesa_node.server.node.move_limiter import MoveLimiter
from nesa_node.server.node.shutdown import stop_signals
from nesa_node.swarm.p2p import tasks as event_loop


async def main() -> None:
    config = NodeConfig.model_validate(json.loads(sys.argv[1]))
    moves = MoveLimiter(per_hour=1000, pause_s=0)
    obeying = asyncio.create_task(_obey(moves))
    with stop_signals() as stopping:
        await serve_node(config, stopping, moves)
    obeying.cancel()
    await asyncio.gather(obeying, return_exceptions=True)


async def _obey(moves: MoveLimiter) -> None:
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async for line in lines:
        wish = moves.request_move(Span.parse(line.decode()), "told")
        answer = await wish.wait()
        print(answer, psutil.Process().memory_full_info().uss, flush=True)


if __name__ == "__main__":
    event_loop.run_event_loop(main())
