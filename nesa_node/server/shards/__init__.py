"""Shards of private deployments, held for the owners of models."""
