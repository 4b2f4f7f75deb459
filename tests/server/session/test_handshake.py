"""A flood of refusals leaves a few lines and a number."""

from structlog.testing import capture_logs

from nesa_node.server.session.message_loop import MAX_LOGGED_REFUSALS, REFUSAL_PERIOD_S, RefusalLog


def test_only_the_first_refusals_of_a_period_are_told_and_the_others_counted() -> None:
    now = 0.0
    refusals = RefusalLog(clock=lambda: now)
    with capture_logs() as logs:
        for _ in range(MAX_LOGGED_REFUSALS + 500):
            refusals.record(peer="p", code="busy", reason="full")
        assert len(logs) == MAX_LOGGED_REFUSALS
        now += REFUSAL_PERIOD_S
        refusals.record(peer="p", code="busy", reason="full")
        now += REFUSAL_PERIOD_S
        refusals.record(peer="p", code="busy", reason="full")
    assert [entry["event"] for entry in logs[MAX_LOGGED_REFUSALS:]] == [
        "refusals_not_logged",
        "stream_refused",
        "stream_refused",
    ]
    assert logs[MAX_LOGGED_REFUSALS]["count"] == 500
