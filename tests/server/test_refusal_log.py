"""A flood of refusals leaves a few lines and a number."""

from structlog.testing import capture_logs

from nesa_node.server.refusal_log import MOST, PERIOD_S, RefusalLog


def test_only_the_first_refusals_of_a_period_are_told_and_the_others_counted() -> None:
    now = 0.0
    refusals = RefusalLog(clock=lambda: now)
    with capture_logs() as logs:
        for _ in range(MOST + 500):
            refusals.note(peer="p", code="busy", reason="full")
        assert len(logs) == MOST
        now += PERIOD_S
        refusals.note(peer="p", code="busy", reason="full")
        now += PERIOD_S
        refusals.note(peer="p", code="busy", reason="full")
    assert [entry["event"] for entry in logs[MOST:]] == [
        "refusals_not_logged",
        "stream_refused",
        "stream_refused",
    ]
    assert logs[MOST]["count"] == 500
