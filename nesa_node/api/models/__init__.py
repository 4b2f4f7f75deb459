"""Models of the swarm: discovered, opened, and shared by concurrent requests."""
