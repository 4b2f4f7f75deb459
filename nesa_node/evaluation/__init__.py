"""How good a model's answers are, and what fewer bits for weights and wire cost them."""
