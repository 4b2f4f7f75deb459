"""Child processes with limits of CPU time and memory, and threads shared fairly."""
