"""Logging: one structlog pipeline to stderr for own events and for records of libraries.

Peers cause events: their rate is limited, so that they cannot fill the disk, and untrusted text is
escaped, since terminals execute control characters.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
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

from nesa_node.core.settings.choices import LogFormat, LogLevel

_CONTROL_CODES = (
    *range(0x20),  # control characters, C0
    *range(0x7F, 0xA0),  # and C1
    *(0x2028, 0x2029),  # line separators
    *range(0x202A, 0x202F),  # bidirectional overrides
    *range(0x2066, 0x206A),
    *range(0xD800, 0xE000),  # surrogates
)
# `str.translate` with a table is ten times as fast as a function per character.
_ESCAPES = {code: chr(code).encode("unicode_escape").decode("ascii") for code in _CONTROL_CODES}
_ESCAPES_IN_LINES = {code: text for code, text in _ESCAPES.items() if chr(code) not in "\n\t"}


def escape_text(text: str) -> str:
    """`text` on one line, with control characters, also line breaks and tabs, as escapes."""
    return text if text.isprintable() else text.translate(_ESCAPES)


def escape_lines(text: str) -> str:
    """`text` with control characters as escapes; line breaks and tabs are kept."""
    return text if text.isprintable() else text.translate(_ESCAPES_IN_LINES)


MAX_EVENT_BURST = 200.0
"""Most events of one name that are written at once (capacity of its token bucket)."""
EVENTS_PER_S = 1.0
"""Events of one name that are written per second once the burst is used up."""
TRACEBACK_COST_EVENTS = 10.0
"""Tokens that an event with a traceback costs: it is about ten times as long."""
MAX_EVENT_NAMES = 4096
"""Most buckets kept; beyond that all are forgotten, which bounds the memory."""


@dataclass(slots=True)
class _TokenBucket:
    tokens: float
    updated_at_s: float
    dropped: int = 0


class EventRateLimiter:
    """Token bucket per event name: `MAX_EVENT_BURST` events at once, then `EVENTS_PER_S` a second.

    `clock` is monotonic, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._buckets: dict[str, _TokenBucket] = {}

    def admit(self, name: str, *, has_traceback: bool = False) -> int | None:
        """Count of dropped events of this name since the last written one; None drops this one."""
        now = self._clock()
        bucket = self._buckets.get(name)
        if bucket is None:
            if len(self._buckets) >= MAX_EVENT_NAMES:
                self._buckets.clear()
            bucket = self._buckets[name] = _TokenBucket(MAX_EVENT_BURST, now)
        bucket.tokens = min(
            bucket.tokens + (now - bucket.updated_at_s) * EVENTS_PER_S, MAX_EVENT_BURST
        )
        bucket.updated_at_s = now
        cost = TRACEBACK_COST_EVENTS if has_traceback else 1.0
        if bucket.tokens < cost:
            bucket.dropped += 1
            return None
        bucket.tokens -= cost
        dropped, bucket.dropped = bucket.dropped, 0
        return dropped


_SECRET_KEY = re.compile(r"(^|_)(token|swarm_key|secret|password|private_key)$")
_QUIET_LIBRARIES = ("asyncio", "hivemind", "httpcore", "httpx", "huggingface_hub", "transformers")
UNLIMITED_EVENTS = frozenset({"request_answered"})
"""Events without a rate limit here: only holders of API keys cause them, with limits of a key."""
_clock = time.monotonic
_WarningLogger: Any = structlog.make_filtering_bound_logger(logging.WARNING)


def get_logger(name: str) -> FilteringBoundLogger:
    """Logger that follows the structlog configuration of the running program.

    Without a configuration (use as a library) it writes warnings and errors to stderr.
    """
    wrapper: Any = _bind_configured_logger
    logger = structlog.wrap_logger(None, wrapper_class=wrapper, logger_factory_args=(name,))
    return cast(FilteringBoundLogger, logger)


def _bind_configured_logger(logger: WrappedLogger, **rest: Any) -> Any:
    """Bind a logger for one event: loggers are created before structlog is configured."""
    if structlog.is_configured():
        return structlog.get_config()["wrapper_class"](logger, **rest)
    return _WarningLogger(structlog.PrintLogger(sys.stderr), **rest)


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
        mask_secrets,
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            _RateLimitProcessor(_clock),
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
                *_make_renderers(log_format, colors=out.isatty()),
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


class _RateLimitProcessor:
    """Structlog processor that limits the rate of events (`logging.py`); not at level debug."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._limiter = EventRateLimiter(clock)

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        name = str(event.get("event"))
        if name in UNLIMITED_EVENTS or logging.getLogger("nesa_node").isEnabledFor(logging.DEBUG):
            return event
        left_out = self._limiter.admit(name, has_traceback=bool(event.get("exc_info")))
        if left_out is None:
            raise structlog.DropEvent
        if left_out:
            event["not_logged"] = left_out
        return event


def session_name(session: bytes) -> str:
    """Short name of a session in events and traces: the first 8 bytes of its id in hex."""
    return session.hex()[:16]


def bind_session(session: bytes) -> AbstractContextManager[None]:
    """Bind a session's name to all events of this task and of tasks started in the context."""
    return structlog.contextvars.bound_contextvars(session=session_name(session))


def mask_secrets(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Structlog processor that masks values of keys named like a secret."""
    for key in event:
        if _SECRET_KEY.search(key):
            event[key] = "***"
    return event


def escape_event_values(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Structlog processor that escapes terminal control characters in an event's values."""
    for key, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[key] = escape_lines(value) if key == "event" else escape_text(value)
        elif isinstance(value, bytes | bytearray | tuple | list | dict | BaseException):
            event[key] = _escape_value(key, value)
    return event


def _escape_value(key: str, value: object) -> object:
    if key in ("exc_info", "stack_info", "_record"):
        return value
    return escape_text(repr(value))


def _print_escaped_traceback(out: TextIO, exc_info: ExcInfo) -> None:
    written = StringIO()
    structlog.dev.plain_traceback(written, exc_info)
    out.write(escape_lines(written.getvalue()))


def _make_renderers(log_format: LogFormat, *, colors: bool) -> list[Processor]:
    """Final processors of a format. They never print locals of frames, which hold prompts, keys."""
    if log_format == "json":
        tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        return [
            structlog.processors.ExceptionRenderer(tracebacks),
            structlog.processors.JSONRenderer(),
        ]
    return [
        escape_event_values,
        structlog.dev.ConsoleRenderer(
            colors=colors, pad_event_to=24, exception_formatter=_print_escaped_traceback
        ),
    ]
