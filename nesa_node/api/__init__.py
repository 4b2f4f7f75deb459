"""The gateway: a swarm behind OpenAI's HTTP API."""
