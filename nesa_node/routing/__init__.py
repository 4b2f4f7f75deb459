"""Routing: the chain of nodes that a session uses, and penalties for nodes that failed."""
