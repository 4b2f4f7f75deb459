"""Shipped parameters of the greedy rule."""

from nesa_node.routing.greedy import Parameters

TUNED = Parameters()
"""The shipped parameters. `python -m benchmarks tuning`, seed 0: 464 candidates of the genetic
algorithm and as many random ones on 348 sessions in synthetic swarms of 10 to 1,000 nodes, judged
on 694 sessions in further swarms. Neither search beat exponents and weights of 1 (1.0982 and 1.0974
against 1.0991, within the error of 0.2 %), so the defaults stay: the rule predicts seconds and
tries several first nodes, which leaves little to tune. `results/tuning-*` has the parameters
found."""
