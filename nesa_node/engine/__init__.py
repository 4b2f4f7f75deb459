"""Running a span of a model: loading, KV cache, forward."""
