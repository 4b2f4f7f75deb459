"""Adaptive threshold of a figure: 1.5 x the 95th percentile of its past, twice in a row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nesa_node.topology.changes.triggers import Sensitivity, Trigger, TriggerName


@dataclass(frozen=True, slots=True)
class Jitter:
    """History of one figure: `past` values that were jitter, oldest first, and undecided ones."""

    past: tuple[float, ...] = ()
    pending: tuple[float, ...] = ()

    def threshold(self, sensitivity: Sensitivity) -> float:
        if len(self.past) < sensitivity.least_history:
            return sensitivity.first_threshold
        usual = float(np.percentile(self.past, sensitivity.jitter_percentile))
        return max(sensitivity.jitter_factor * usual, sensitivity.least_threshold)


def judge_jitter(
    jitter: Jitter, name: TriggerName, figure: float, sensitivity: Sensitivity, what: str
) -> tuple[Jitter, Trigger]:
    """Evaluate one figure; the updated history and the trigger. `what` is its reason, with {}.

    A figure above the threshold that the next snapshot does not confirm was jitter and joins the
    history, so that the threshold adapts. A figure that fired does not.
    """
    threshold = jitter.threshold(sensitivity)
    above = figure > threshold
    pending = (*jitter.pending, figure) if above else ()
    found = Trigger(
        name=name,
        fired=len(pending) >= sensitivity.in_a_row,
        figure=figure,
        threshold=threshold,
        in_a_row=len(pending),
        reason=f"{what.format(f'{figure:.1%}')}; above {threshold:.1%} is no jitter",
    )
    if above:
        return Jitter(jitter.past, () if found.fired else pending), found
    past = (*jitter.past, *jitter.pending, figure)
    return Jitter(past[-sensitivity.history :]), found
