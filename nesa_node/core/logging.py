"""Logging: one structlog pipeline to stderr for own events and for records of libraries."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from io import StringIO
from typing import Any, TextIO, cast

import structlog
from structlog.typing import (
    EventDict,
    ExcInfo,
    FilteringBoundLogger,
    Processor,
    WrappedLogger,
)

from nesa_node.core.choices import LogFormat, LogLevel
from nesa_node.core.event_limit import EventLimit
from nesa_node.core.plain_text import plain_lines, plain_text

_SECRET_KEY = re.compile(r"(^|_)(token|swarm_key|secret|password|private_key)$")
_QUIET_LIBRARIES = ("asyncio", "hivemind", "httpcore", "httpx", "huggingface_hub", "transformers")
UNLIMITED = frozenset({"request_answered"})
"""Events without a rate limit here: only holders of API keys cause them, with limits of a key."""
_clock = time.monotonic
_Warnings: Any = structlog.make_filtering_bound_logger(logging.WARNING)


def get_logger(name: str) -> FilteringBoundLogger:
    """Logger that follows the structlog configuration of the running program.

    Without a configuration (use as a library) it writes warnings and errors to stderr.
    """
    wrapper: Any = _as_the_program_says
    logger = structlog.wrap_logger(None, wrapper_class=wrapper, logger_factory_args=(name,))
    return cast(FilteringBoundLogger, logger)


def _as_the_program_says(logger: WrappedLogger, **rest: Any) -> Any:
    """Bind a logger for one event: loggers are created before structlog is configured."""
    if structlog.is_configured():
        return structlog.get_config()["wrapper_class"](logger, **rest)
    return _Warnings(structlog.PrintLogger(sys.stderr), **rest)


def setup_logging(
    level: LogLevel = "info", log_format: LogFormat = "console", stream: TextIO | None = None
) -> None:
    """Send own events, and warnings of libraries, to `stream` (stderr by default).

    Level `debug` applies to libraries, too. May be called again: the last call counts.
    """
    out = stream if stream is not None else sys.stderr
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        hide_secrets,
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            _Limit(_clock),
            *shared,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.processors.StackInfoRenderer(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_renderers(log_format, colors=out.isatty()),
            ],
        )
    )
    root = logging.getLogger()
    for old in list(root.handlers):
        if getattr(old, "_nesa_node", False):
            root.removeHandler(old)
    handler._nesa_node = True  # type: ignore[attr-defined]
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("nesa_node").setLevel(level.upper())
    for name in _QUIET_LIBRARIES:
        logging.getLogger(name).setLevel(logging.DEBUG if level == "debug" else logging.WARNING)


class _Limit:
    """Structlog processor that limits the rate of events (`event_limit.py`); not at level debug."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._limit = EventLimit(clock)

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        name = str(event.get("event"))
        if name in UNLIMITED or logging.getLogger("nesa_node").isEnabledFor(logging.DEBUG):
            return event
        left_out = self._limit.admit(name, has_traceback=bool(event.get("exc_info")))
        if left_out is None:
            raise structlog.DropEvent
        if left_out:
            event["not_logged"] = left_out
        return event


def session_name(session: bytes) -> str:
    """Short name of a session in events and traces: the first 8 bytes of its id in hex."""
    return session.hex()[:16]


def logging_of(session: bytes) -> AbstractContextManager[None]:
    """Bind a session's name to all events of this task and of tasks started in the context."""
    return structlog.contextvars.bound_contextvars(session=session_name(session))


def hide_secrets(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Structlog processor that masks values of keys named like a secret."""
    for key in event:
        if _SECRET_KEY.search(key):
            event[key] = "***"
    return event


def show_plainly(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Structlog processor that escapes terminal control characters in an event's values."""
    for key, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[key] = plain_lines(value) if key == "event" else plain_text(value)
        elif isinstance(value, bytes | bytearray | tuple | list | dict | BaseException):
            event[key] = _plain_value(key, value)
    return event


def _plain_value(key: str, value: object) -> object:
    if key in ("exc_info", "stack_info", "_record"):
        return value
    return plain_text(repr(value))


def _plain_traceback(out: TextIO, exc_info: ExcInfo) -> None:
    written = StringIO()
    structlog.dev.plain_traceback(written, exc_info)
    out.write(plain_lines(written.getvalue()))


def _renderers(log_format: LogFormat, *, colors: bool) -> list[Processor]:
    """Final processors of a format. They never print locals of frames, which hold prompts, keys."""
    if log_format == "json":
        tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        return [
            structlog.processors.ExceptionRenderer(tracebacks),
            structlog.processors.JSONRenderer(),
        ]
    return [
        show_plainly,
        structlog.dev.ConsoleRenderer(
            colors=colors, pad_event_to=24, exception_formatter=_plain_traceback
        ),
    ]
