"""The words a setting may take. Apart from `config.py`, so that `--help` costs no pydantic."""

from typing import Literal

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
QuantType = Literal["none", "int8", "nf4"]
Route = Literal["chain", "star"]
Precision = Literal["nf4", "int8", "full"]
"""Of weights, the coarsest first. "full": as `--torch-dtype` says, not quantized."""
PlacementGoal = Literal["latency", "throughput"]
"""Of an orchestrator: the time of one step, or the steps of all clients together."""
StrategyName = Literal[
    "exact-latency",
    "exact-throughput",
    "bottleneck",
    "homology-greedy",
    "paper-literal",
    "petals",
    "random",
]
"""Of `routing/strategies.py`."""
SamplingAdvice = Literal["model", "openai"]
"""Whose defaults a gateway takes for requests that do not say how to choose tokens."""
LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
