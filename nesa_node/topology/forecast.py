"""Forecast of which nodes are still here in an hour, from when they were here on past days.

Presence is one sample per slot of ten minutes. Two models are joined. *Seasonal*: of the slots
around this time of day, in the past two weeks, in which the node was here (or away) as it is now,
the share after which it was here an hour later. *Survival*: the same share of all nodes at all
times that had been here (or away) for as long, a life table (Kaplan and Meier). The latter counts
as two days of the former. Until there are looks of three days, every node is expected to stay.
`benchmarks forecast` has the errors, and what placing ahead gains.

Legend: T slots, oldest first, the last one now; N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nesa_node.core.arrays import Bools, Floats, Ints
from nesa_node.core.ids import PeerId

SLOT_S = 600.0
SLOTS_PER_DAY = 144
PAST_DAYS = 14
PAST_SLOTS = PAST_DAYS * SLOTS_PER_DAY
SLOTS_AHEAD = 6
"""An hour."""
_AROUND = 3
"""Slots before and after this time of day that count as this time."""
_SURVIVAL_DAYS = 2.0
"""Weight of the survival model, in days of the node's own."""
_MIN_DAYS = 3.0
"""Days with looks at this time, below which nothing is known of habits."""
_LEAVING_CHANCE = 0.5
"""Chance to be here below which a node counts as leaving."""


def slot_of(at_s: float) -> int:
    """The number of the slot at a time in seconds since the epoch."""
    return int(at_s // SLOT_S)


def forecast_departures(
    peers: Sequence[PeerId], here_TN: Bools, seen_T: Bools, now_s: float
) -> dict[PeerId, float]:
    """The nodes of `peers` that are likely to leave within the hour, and when (since the epoch).

    All are here in the last slot, that of `now_s`. Arguments as in `chance_here`.
    """
    leaves_N = chance_here(here_TN, seen_T) < _LEAVING_CHANCE
    if not leaves_N.any():
        return {}
    chances_AN = [chance_here(here_TN, seen_T, ahead) for ahead in range(1, SLOTS_AHEAD + 1)]
    first_N = (np.array(chances_AN) < _LEAVING_CHANCE).argmax(axis=0) + 1
    now = slot_of(now_s)
    return {
        peers[row]: float((now + first_N[row]) * SLOT_S)
        for row in np.flatnonzero(leaves_N).tolist()
    }


def chance_here(here_TN: Bools, seen_T: Bools, ahead: int = SLOTS_AHEAD) -> Floats:
    """The probability that each node is here `ahead` slots after the last one, [N].

    `seen_T`: the slots with a look; without one `here_TN` means nothing. With looks of
    fewer than `_MIN_DAYS` days nodes keep their state. 1 <= `ahead` <= 140.
    """
    last = len(here_TN) - 1
    now_N: Bools = here_TN[last]
    past = last - SLOTS_PER_DAY * np.arange(1, PAST_DAYS + 1)[:, None]
    past = (past + np.arange(-_AROUND, _AROUND + 1)).ravel()
    past = past[past >= 0]
    past = past[seen_T[past] & seen_T[past + ahead]]
    if len(past) < _MIN_DAYS * (2 * _AROUND + 1):
        return now_N.astype(np.float64)
    alike_PN = here_TN[past] == now_N
    days_N = alike_PN.sum(axis=0) / (2 * _AROUND + 1)
    later_N = (alike_PN & here_TN[past + ahead]).sum(axis=0) / (2 * _AROUND + 1)
    survival_N = _survival(here_TN, seen_T, ahead)
    chance_N: Floats = (later_N + _SURVIVAL_DAYS * survival_N) / (days_N + _SURVIVAL_DAYS)
    return chance_N


def _survival(here_TN: Bools, seen_T: Bools, ahead: int) -> Floats:
    """Of all nodes and times in the state of each node now, and for as long (a day at most), the
    share that was here `ahead` slots later, [N]. Each share begins with one node that stays so."""
    state_TN, age_TN = _ages(here_TN, seen_T)
    known_T = seen_T[:-ahead] & seen_T[ahead:]
    state_XN, age_XN = state_TN[:-ahead][known_T], age_TN[:-ahead][known_T]
    later_XN = here_TN[ahead:][known_T]
    chance_N = np.zeros(here_TN.shape[1])
    for state in (False, True):
        inside_XN = state_XN == state
        count = np.bincount(age_XN[inside_XN], minlength=SLOTS_PER_DAY)
        here = np.bincount(age_XN[inside_XN], later_XN[inside_XN], minlength=SLOTS_PER_DAY)
        share = (here + state) / (count + 1)
        chance_N = np.where(state_TN[-1] == state, share[age_TN[-1]], chance_N)
    return chance_N


def _ages(here_TN: Bools, seen_T: Bools) -> tuple[Bools, Ints]:
    """The state of each node, which lasts through slots without a look, and for how many slots it
    has lasted, at most a day; both [T, N]."""
    at_T = np.arange(len(here_TN))
    state_TN = here_TN[np.maximum.accumulate(np.where(seen_T, at_T, 0))]
    since_TN = np.zeros(here_TN.shape, dtype=np.int64)
    since_TN[1:] = np.where(state_TN[1:] != state_TN[:-1], at_T[1:, None], 0)
    age_TN = at_T[:, None] - np.maximum.accumulate(since_TN, axis=0)
    return state_TN, np.minimum(age_TN, SLOTS_PER_DAY - 1)
