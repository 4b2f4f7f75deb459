"""What is left in the buffer of stdout or stderr when writing there fails."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TextIO


def drop(stream: TextIO) -> None:
    """Send what `stream` still holds nowhere: Python flushes it once more when it ends."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
