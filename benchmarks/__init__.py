"""Measurements that a user can repeat; see README.md in this folder."""
