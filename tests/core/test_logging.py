"""What reaches the log, and what must not."""

from __future__ import annotations

import io
import json
import logging

import pytest
import structlog

from nesa_node.core.logging import get_logger, setup_logging
from nesa_node.core.settings.choices import LogFormat

pytestmark = pytest.mark.usefixtures("logging_given_back")


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_secrets_and_locals_of_tracebacks_never_reach_the_log(log_format: LogFormat) -> None:
    out = io.StringIO()
    setup_logging("debug", log_format, out)
    log = get_logger("nesa_node.test")
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
    get_logger("nesa_node.test").info("chain_chosen", hops=3)
    line = json.loads(out.getvalue())
    assert line["event"] == "chain_chosen"
    assert line["hops"] == 3
    assert line["level"] == "info"
    assert line["timestamp"].endswith("Z")


def test_levels_filter_ours_and_libraries_only_warn() -> None:
    out = io.StringIO()
    setup_logging("warning", "console", out)
    get_logger("nesa_node.test").info("quiet")
    logging.getLogger("httpx").info("chatter")
    logging.getLogger("httpx").warning("library warning")
    assert "quiet" not in out.getvalue()
    assert "chatter" not in out.getvalue()
    assert "library warning" in out.getvalue()


def test_setting_up_twice_does_not_print_twice() -> None:
    out = io.StringIO()
    setup_logging("info", "console", io.StringIO())
    setup_logging("info", "console", out)
    get_logger("nesa_node.test").info("once")
    assert out.getvalue().count("once") == 1


def test_a_program_that_configured_nothing_sees_warnings_only_and_on_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = get_logger("nesa_node.test")
    log.debug("whispered")
    log.info("said")
    log.warning("called", peers=3)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "called" in captured.err
    assert "whispered" not in captured.err
    assert "said" not in captured.err
    structlog.get_logger().info("the program's own")
    assert "the program's own" in capsys.readouterr().out


def test_a_program_that_configures_structlog_gets_our_events_its_own_way(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = get_logger("nesa_node.test")
    log.info("before")
    structlog.configure(processors=[structlog.processors.JSONRenderer()])
    log.info("after", hops=3)
    assert json.loads(capsys.readouterr().out) == {"event": "after", "hops": 3}


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_log_shows_plainly_what_peers_wrote(log_format: LogFormat) -> None:
    evil = "\x1b[2J\x1b]52;c;cm0gLXJmIH4=\x07 run this\r\n\u202e\x9b1m"
    out = io.StringIO()
    setup_logging("info", log_format, out)
    log = get_logger("nesa_node.test")
    log.info("peer_failed", reason=evil, others=(evil,), raw=evil.encode())
    try:
        raise ValueError(evil)
    except ValueError as error:
        log.exception("failed", cause=error)
    assert out.getvalue().count("run this") >= 4
    assert not set(out.getvalue()) & set("\x1b\x07\r\u202e\x9b")
