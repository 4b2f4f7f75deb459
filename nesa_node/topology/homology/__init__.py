"""The shape of a network: filtrations, merge trees, persistence diagrams and what is read from them."""
