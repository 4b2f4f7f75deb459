"""Pages about a running daemon, for its operator: read only, on loopback unless told otherwise."""
