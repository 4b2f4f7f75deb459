"""A swarm of machines that serves one model: each holds a span of its blocks.

    from nesa_node import AutoDistributedModelForCausalLM
    from nesa_node import SwarmPipeline  # networks that are no language models

Exports are loaded on first use, so that `import nesa_node` costs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nesa_node.client.graphs.remote_network import RemoteNetwork as RemoteNetwork
    from nesa_node.client.graphs.swarm_pipeline import SwarmPipeline as SwarmPipeline
    from nesa_node.client.model.auto import (
        AutoDistributedModelForCausalLM as AutoDistributedModelForCausalLM,
    )
    from nesa_node.server.adapters.requests import fetch_adapter as fetch_adapter
    from nesa_node.server.adapters.requests import list_adapters as list_adapters
    from nesa_node.server.adapters.requests import publish_adapter as publish_adapter
    from nesa_node.server.adapters.requests import remove_adapter as remove_adapter
    from nesa_node.server.pool.requests import create_swarm as create_swarm
    from nesa_node.server.pool.requests import list_swarms as list_swarms
    from nesa_node.server.pool.requests import remove_swarm as remove_swarm
    from nesa_node.server.pool.requests import scale_swarm as scale_swarm
    from nesa_node.server.pool.requests import show_swarm as show_swarm

__version__ = "0.1.0"

_EXPORTS = {
    "AutoDistributedModelForCausalLM": "nesa_node.client.model.auto",
    "RemoteNetwork": "nesa_node.client.graphs.remote_network",
    "SwarmPipeline": "nesa_node.client.graphs.swarm_pipeline",
    **dict.fromkeys(
        ("create_swarm", "list_swarms", "remove_swarm", "scale_swarm", "show_swarm"),
        "nesa_node.server.pool.requests",
    ),
    **dict.fromkeys(
        ("fetch_adapter", "list_adapters", "publish_adapter", "remove_adapter"),
        "nesa_node.server.adapters.requests",
    ),
}

__all__ = [
    "AutoDistributedModelForCausalLM",
    "RemoteNetwork",
    "SwarmPipeline",
    "__version__",
    "create_swarm",
    "fetch_adapter",
    "list_adapters",
    "list_swarms",
    "publish_adapter",
    "remove_adapter",
    "remove_swarm",
    "scale_swarm",
    "show_swarm",
]


def __getattr__(name: str) -> object:
    """Load an export on first use (PEP 562)."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
