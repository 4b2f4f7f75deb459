"""Deliberate one-line mistakes, and the tests that have to notice them."""
