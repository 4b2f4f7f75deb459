"""Identifiers that travel through every layer."""

from typing import NewType

PeerId = NewType("PeerId", str)
"""A libp2p peer id in base58. An Ed25519 peer id contains the public key itself."""

ModelId = NewType("ModelId", str)
"""`name@digest`: nodes of one swarm share it (`engine/model_id.py`)."""

SessionId = NewType("SessionId", bytes)
"""16 random bytes chosen by the client."""
