"""Gateway: OpenAI's HTTP API for the models of a swarm."""
