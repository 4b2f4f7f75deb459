"""A node's products of its weights with vectors that it cannot read."""
