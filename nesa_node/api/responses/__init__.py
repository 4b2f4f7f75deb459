"""Responses: JSON and server-sent events, errors, and limits on responses in flight."""
