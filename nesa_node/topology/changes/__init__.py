"""Has the network really changed? Triggers that tell partitions, losses, detours from jitter."""
