"""`python -m benchmarks.artificial_gpu run ...`: a machine whose offer says that it has a GPU.

It computes on the CPU. Its figures are those measured, times `BENCHMARK_OVERSTATED` (1).
"""

from __future__ import annotations

import os
from typing import Any

from nesa_node.__main__ import main
from nesa_node.server.pool import member
from nesa_node.server.pool.member import PoolMember
from nesa_node.swarm.dht.pool_notices import MeasuredFigures

OVERSTATED = "BENCHMARK_OVERSTATED"
_offer_fields = PoolMember._offer_fields


def _fields_of_a_gpu(self: PoolMember) -> dict[str, Any]:
    fields, factor = _offer_fields(self), float(os.environ.get(OVERSTATED, "1"))
    figures = {
        kind: MeasuredFigures.model_validate(
            each.model_dump()
            | {
                "block_overhead_s": each.block_overhead_s / factor,
                "read_bytes_per_s": each.read_bytes_per_s * factor,
                "flop_per_s": each.flop_per_s * factor,
            }
        )
        for kind, each in fields["figures"].items()
    }
    return fields | {"device_type": "cuda", "figures": figures}


if __name__ == "__main__":
    member.describe_device = lambda device: ("Artificial GPU", 1)
    # Patched, since no setting makes a machine lie about its device.
    PoolMember._offer_fields = _fields_of_a_gpu  # type: ignore[method-assign]
    main()
