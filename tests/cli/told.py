"""What a command would tell that it waits for, asked from within its work."""

from __future__ import annotations

from nesa_node.core.wait_tracking import current_tracker


def told_now() -> list[str]:
    """The youngest wait that is open here; none where no surface shows waits or none is open."""
    waits = current_tracker()
    wait = None if waits is None else waits.slow_wait(0)
    return [] if wait is None else [wait.what]
