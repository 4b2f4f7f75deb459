"""Parameters of the greedy rule as they are shipped, and how they were found."""

from nesa_node.routing.greedy import Parameters

TUNED = Parameters(
    gamma=1.8,
    beta=1.2,
    alpha=1.0,
    transfer_weight=0.35,
    load_weight=1.0,
    reliability_weight=0.05,
)
