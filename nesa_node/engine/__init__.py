"""Inference engine for a span of a model: loading, KV cache, forward pass."""
