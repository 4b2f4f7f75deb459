"""Allowed values of settings. Imports no pydantic, unlike `models.py`."""

from typing import Literal

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
AuditorChoice = Literal["auto", "client", "nodes"]
AttestationSource = Literal["none", "auto", "tdx", "snp", "command"]
AuditScheme = Literal["relative-l2", "jl-32", "toploc", "simhash", "dhash", "dhash-z"]
"""Ways to compare outputs in audits; `verification/schemes.py` implements them."""
RedundancyName = Literal["none", "2of3", "paper", "cdv"]
"""How nodes check each other (`nesa_node/verification/agreement.py`)."""
PrivateScheme = Literal["ckks", "masks"]
"""What hides vectors from nodes that multiply them."""
PrivacyName = Literal["none", "ckks", "masks"]
"""How hidden states are kept from nodes (`docs/private-sessions.md`)."""
QuantType = Literal["none", "int8", "nf4", "llm_int8"]
"""How weights of blocks are held. `llm_int8` has int8's weights, and rounds inputs, too."""
PoolQuantType = Literal["none", "int8", "nf4"]
"""What an orchestrator may assign: `llm_int8` takes as much memory as `int8`, and more time."""
ClientQuantType = Literal["none", "int8", "nf4"]
"""How a client holds the weights of its own parts."""
CacheDtype = Literal["auto", "int8"]
"""What a KV cache holds: values as they are computed, or in 8 bits."""
RouteName = Literal["chain", "star"]
Precision = Literal["nf4", "int8", "full"]
"""Weight precisions, coarsest first. "full": the `--torch-dtype`, not quantized."""
PlacementGoal = Literal["latency", "throughput"]
"""An orchestrator's objective: least time per step, or most steps per second of all clients."""
WeightQuality = Literal["exact", "high", "balanced"]
"""Floor of the weights' precision in a swarm that is built: not quantized, int8, nf4."""
StrategyName = Literal[
    "exact-latency",
    "exact-throughput",
    "bottleneck",
    "homology-greedy",
    "paper-literal",
    "petals",
    "random",
]
"""Routing strategies; `routing/strategies.py` implements them."""
SamplingDefaults = Literal["model", "openai"]
"""Source of a gateway's sampling defaults for requests without sampling parameters."""
LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
FlagGroup = Literal[
    "Swarm", "Model and device", "Pool", "Orchestration", "Access", "Limits", "Sampling", "Output"
]
"""Headings of flags in `--help`."""
GENERATED_ITEMS = "generated"
"""Value of `eval --choices` for items made from the text."""
