"""The peer-to-peer network. This is the only package that imports hivemind."""
