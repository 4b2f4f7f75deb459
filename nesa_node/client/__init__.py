"""Client SDK: models that run in a swarm, and their sessions."""
