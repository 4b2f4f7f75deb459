"""Every parser of bytes that a peer, a hub or a client chose, by name."""

from __future__ import annotations

from tests.fuzz import (
    file_targets,
    gateway_targets,
    hub_targets,
    session_targets,
    swarm_targets,
    web_targets,
)
from tests.fuzz.target import Target

TARGETS: dict[str, Target] = {
    **swarm_targets.TARGETS,
    **session_targets.TARGETS,
    **file_targets.TARGETS,
    **hub_targets.TARGETS,
    **gateway_targets.TARGETS,
    **web_targets.TARGETS,
}
