"""Evaluation: the quality lost by quantizing a model's weights and hidden states."""
