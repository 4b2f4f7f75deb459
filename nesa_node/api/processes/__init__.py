"""Child processes with limits of CPU time and memory, for work that may never end."""
