"""Change detection: triggers that tell partitions, losses and detours from jitter."""
