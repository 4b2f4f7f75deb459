"""Answers of gateways, computed again from their requests and compared token by token."""
