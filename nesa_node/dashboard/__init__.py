"""Dashboard: a web page that shows a swarm live, read only."""
