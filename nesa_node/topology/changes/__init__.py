"""Has the network really changed? Triggers that tell a partition, a loss or a detour from jitter."""
