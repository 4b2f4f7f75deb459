"""Real daemons in three regions of an emulated network: what they choose, move, survive."""
