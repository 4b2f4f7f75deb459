"""What answers look like, whole and as server-sent events."""
