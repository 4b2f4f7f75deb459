"""What reaches the log, and what must not."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from nesa_node.core.choices import LogFormat
from nesa_node.core.logging import setup_logging


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_secrets_and_locals_of_tracebacks_never_reach_the_log(log_format: LogFormat) -> None:
    out = io.StringIO()
    setup_logging("debug", log_format, out)
    log = structlog.get_logger("nesa_node.test")
    log.info("joined", token="hf_abc", swarm_key="sesame", peers=3)
    prompt = "my diary"
    try:
        raise ValueError(len(prompt))
    except ValueError:
        log.exception("failed")
    text = out.getvalue()
    assert "joined" in text
    assert "ValueError" in text
    for secret in ("hf_abc", "sesame", "diary"):
        assert secret not in text


def test_json_lines_hold_event_level_and_time() -> None:
    out = io.StringIO()
    setup_logging("info", "json", out)
    structlog.get_logger("nesa_node.test").info("chain_chosen", hops=3)
    line = json.loads(out.getvalue())
    assert line["event"] == "chain_chosen"
    assert line["hops"] == 3
    assert line["level"] == "info"
    assert line["timestamp"].endswith("Z")


def test_levels_filter_ours_and_libraries_only_warn() -> None:
    out = io.StringIO()
    setup_logging("warning", "console", out)
    structlog.get_logger("nesa_node.test").info("quiet")
    logging.getLogger("httpx").info("chatter")
    logging.getLogger("httpx").warning("library warning")
    assert "quiet" not in out.getvalue()
    assert "chatter" not in out.getvalue()
    assert "library warning" in out.getvalue()


def test_setting_up_twice_does_not_print_twice() -> None:
    out = io.StringIO()
    setup_logging("info", "console", io.StringIO())
    setup_logging("info", "console", out)
    structlog.get_logger("nesa_node.test").info("once")
    assert out.getvalue().count("once") == 1
