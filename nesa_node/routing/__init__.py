"""Who runs what for a session: chains of nodes, and which nodes to avoid."""
