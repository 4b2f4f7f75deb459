"""Network topology: snapshots of nodes, their links, and the shape of the network."""
