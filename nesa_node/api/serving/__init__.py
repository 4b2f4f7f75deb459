"""Models of the swarm, found and opened, and used by many requests at once."""
