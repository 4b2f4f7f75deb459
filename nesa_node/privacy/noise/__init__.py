"""Noise in hidden states: differential privacy of what a client sends."""
