"""Private prompts: products of a node's weights with vectors that it cannot read."""
