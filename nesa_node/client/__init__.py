"""The SDK: one model to the caller, a swarm behind it."""
