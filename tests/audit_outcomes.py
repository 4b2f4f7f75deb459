"""What a test's client found in its audits."""

from __future__ import annotations

from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.core.metrics import AUDITS


def audit_outcomes(model: DistributedModelForCausalLM) -> dict[str, int]:
    """Audits by outcome, also of a model that is closed."""
    audits = [sample for sample in model.samples() if sample.metric is AUDITS]
    return {
        sample.labels[1]: sample.value
        for sample in audits
        if isinstance(sample.value, int) and sample.value
    }
