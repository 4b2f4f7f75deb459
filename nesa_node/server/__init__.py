"""The daemon: takes a span, announces it, serves sessions, leaves in order."""
