"""Standard streams that are closed, full or disconnected, and encodings that lack characters."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import TextIO

from nesa_node.core.errors import OutputError


def open_closed_streams() -> None:
    """Open /dev/null for standard streams that are closed (`>&-`).

    In the order of their numbers, so that each gets its own file descriptor: else a file or socket
    could get it, and a child process could write into that.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def escape_unencodable_output() -> None:
    """Let stdout escape characters that its encoding lacks (`\\u2192`), as stderr does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def as_output_error(error: BaseException) -> OutputError | None:
    """Convert an error of writing to stdout or stderr, else None. The stream is redirected then.

    Unwritten data stays in the stream's buffer, so a flush fails again, which identifies the
    stream. One without a buffer (`PYTHONUNBUFFERED`) is tested with an empty line.
    """
    if not isinstance(error, OSError) or error.errno in (None, errno.EPIPE):
        return None
    streams = (sys.stdout, sys.stderr)
    failed = next((stream for stream in streams if _write_errno(stream) == error.errno), None)
    if failed is None:
        return None
    redirect_to_null(failed)
    return OutputError(
        f"cannot write the output: {error.strerror}; free some space there, or send it elsewhere"
    )


def redirect_to_null(stream: TextIO) -> None:
    """Redirect `stream` to /dev/null, so that Python's flush at exit does not fail."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _write_errno(stream: TextIO) -> int | None:
    """Error number of a failing write to `stream`; None if it works."""
    try:
        if getattr(stream, "write_through", False):
            stream.write("\n")
        stream.flush()
    except OSError as error:
        return error.errno
    return None
