"""Identifiers of peers, models and sessions."""

import os
from typing import NewType

PeerId = NewType("PeerId", str)
"""A libp2p peer id in base58. An Ed25519 peer id contains the public key itself."""

ModelId = NewType("ModelId", str)
"""`name@digest`: nodes of one swarm share it (`engine/weights/checkpoint.py`)."""

SessionId = NewType("SessionId", bytes)
"""16 random bytes chosen by the client."""


def model_name_candidates(model: str) -> frozenset[str]:
    """Names under which nodes may announce the command line's `model` (name, folder or full id).

    Symbolic links of a folder are resolved, as the node that serves it does.
    """
    folder = os.path.expanduser(model)
    resolved = os.path.realpath(folder) if os.path.isdir(folder) else model
    return frozenset({model} | {os.path.basename(path.rstrip("/")) for path in (model, resolved)})
