"""Model identifier, under which nodes find each other in the swarm."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from nesa_node.core.ids import ModelId
from nesa_node.engine.checkpoint import Checkpoint

# Config keys outside the architecture, which differ between two saves of one model.
_NOT_ARCHITECTURE = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


def model_id(checkpoint: Checkpoint) -> ModelId:
    """Return `name@digest`, with 16 hex digits of SHA-256 over the config and the weights.

    Weights count by the hub's file hashes, or for a local folder by their headers and a sample of
    every tensor's bytes (`digests.py`). So a folder and its hub repository are two swarms, as are
    folders of the same name with different weights. Reads the folder; blocks the thread.
    """
    config = {
        key: value for key, value in checkpoint.raw_config().items() if key not in _NOT_ARCHITECTURE
    }
    return ModelId(f"{checkpoint.name}@{_digest(config, checkpoint.tensor_digests())}")


def _digest(config: Mapping[str, object], tensors: Mapping[str, str]) -> str:
    canonical = json.dumps([config, tensors], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
