"""Standard streams: closed, full or without some characters; and prompts read from them."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import TextIO

from nesa_node.core.errors import ConfigError, OutputError
from nesa_node.core.wait_tracking import track_wait


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


MAX_PROMPT_CHARS = 1 << 26
"""Longest prompt on stdin, in characters: more than the context of any model."""


def accept_invalid_utf8() -> None:
    """Let stdin decode invalid UTF-8 as lone surrogates, which `check_utf8` finds.

    So the lines after it can still be read.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")


def read_prompt() -> str:
    """Read all of stdin; at a terminal print at once that a prompt is expected.

    Raises `ConfigError` if it is longer than `MAX_PROMPT_CHARS`. Invalid UTF-8 is kept for
    `check_utf8`.
    """
    accept_invalid_utf8()
    if sys.stdin.isatty():
        print("type the prompt; Ctrl-D on a line of its own ends it", file=sys.stderr, flush=True)
        text = sys.stdin.read(MAX_PROMPT_CHARS + 1)
    else:
        with track_wait("the prompt on stdin to end"):
            text = sys.stdin.read(MAX_PROMPT_CHARS + 1)
    if len(text) > MAX_PROMPT_CHARS:
        raise ConfigError(f"the prompt on stdin has more than {MAX_PROMPT_CHARS} characters")
    return text


def check_utf8(text: str, what: str) -> str:
    """Return `text`; raise `ConfigError` if its bytes were not UTF-8. `what` names it there."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        line = text.count("\n", 0, error.start) + 1
        at = error.start - text.rfind("\n", 0, error.start)
        raise ConfigError(
            f"{what} is not UTF-8 (line {line}, character {at}): give it in that encoding, as "
            "`iconv -t UTF-8` writes it"
        ) from None
    return text
