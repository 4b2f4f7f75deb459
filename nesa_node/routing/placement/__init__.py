"""Placement: which node holds which span, and moves to a better placement."""
