"""The table of `--stats`."""

from __future__ import annotations

from nesa_node.cli.views.phases import format_phases


def test_the_longest_wait_comes_first_and_shares_add_up() -> None:
    text = format_phases({"weights to be loaded": 2.5, "a step": 12.25}, 20.0)
    assert text.splitlines() == [
        "waited for            seconds       %",
        "a step                  12.25   61.3%",
        "weights to be loaded     2.50   12.5%",
        "all else                 5.25   26.2%",
        "total                   20.00  100.0%",
    ]
