"""Attacks on what nodes receive: how much of a session's text can be recovered from it."""
