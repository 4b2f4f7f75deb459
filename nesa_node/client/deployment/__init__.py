"""Private deployments, as a model's owner uses them: members hold shards, and no DHT knows."""
