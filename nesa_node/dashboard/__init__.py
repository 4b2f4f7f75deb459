"""A page that shows a swarm live: watched from outside, read only."""
