"""`nesa-node explain [NAME]`: reasons of logged routing and placement decisions."""

from __future__ import annotations

import json
import sys
from typing import Annotated

from cyclopts import Parameter

from nesa_node.cli.flags import JsonFlag

MAX_LISTED = 20
MAX_READ = 1000
"""Decisions read for a list; repeats are folded into one of `MAX_LISTED` rows."""


def explain(
    name: Annotated[
        str | None,
        Parameter(help="Session or placement, or a prefix of it. [default: list the last]"),
    ] = None,
    /,
    *,
    as_json: JsonFlag = False,
) -> int:
    """Show the last routing and placement decisions of this user, their costs and alternatives."""
    from nesa_node.core.decision_log import DecisionLog
    from nesa_node.core.settings.declaration import default_decisions_path

    log = DecisionLog(default_decisions_path())
    found = log.recent(MAX_LISTED if as_json else MAX_READ) if name is None else log.find(name)
    if as_json:
        shown = [
            {"kind": one.kind, "name": one.name, "made_at": one.made_at, **one.body}
            for one in found
        ]
        json.dump(shown, sys.stdout, indent=2)
        print()
        return 0
    from nesa_node.cli.views.decisions import print_decision, print_decisions

    if name is None:
        print_decisions(found[::-1], MAX_LISTED)
    else:
        for decision in found:
            print_decision(decision)
    return 0
