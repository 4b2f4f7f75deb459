"""Sharding: the span of blocks that each node holds."""
