"""Persistent homology of a network: filtrations, merge trees, persistence diagrams, features."""
