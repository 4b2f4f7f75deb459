"""Standard streams that are closed, full or gone: a command has nowhere to write then."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import TextIO

from nesa_node.core.errors import OutputError


def open_closed_streams() -> None:
    """Stand-ins for standard streams that the command was started without (`>&-`).

    In the order of their numbers, so that each gets its own: no file or socket of ours, into which
    a child process might write, takes it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def write_any_character() -> None:
    """Let stdout write what its encoding lacks as `\\u2192`, as stderr does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def as_output_error(error: BaseException) -> OutputError | None:
    """`error` in our words if it comes from writing to stdout or stderr, which are given up then.

    What could not be written stays in the stream's buffer, so that it fails once more. A stream
    without a buffer (`PYTHONUNBUFFERED`) is tried with an empty line.
    """
    if not isinstance(error, OSError) or error.errno in (None, errno.EPIPE):
        return None
    streams = (sys.stdout, sys.stderr)
    failed = next((stream for stream in streams if _failure(stream) == error.errno), None)
    if failed is None:
        return None
    drop(failed)
    return OutputError(
        f"cannot write the output: {error.strerror}; free some space there, or send it elsewhere"
    )


def drop(stream: TextIO) -> None:
    """Send what `stream` still holds nowhere: Python flushes it once more when it ends."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _failure(stream: TextIO) -> int | None:
    """The error number with which writing to `stream` fails."""
    try:
        if getattr(stream, "write_through", False):
            stream.write("\n")
        stream.flush()
    except OSError as error:
        return error.errno
    return None
