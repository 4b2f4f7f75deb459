"""A wide-area network on one machine: sites in Linux network namespaces, joined by emulated links.

`open_wan` in `wan.py` is the way in. README.md in the folder above says what it can and cannot.
"""
