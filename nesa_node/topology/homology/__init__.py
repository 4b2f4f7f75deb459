"""The shape of a network: filtrations, merge trees, persistence diagrams, and their uses."""
