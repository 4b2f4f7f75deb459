"""Compression: tensors as bytes on the wire, exact or lossy."""

if __name__ == "compression":
    # The checkout's root holds a link `compression -> nesa_node/compression`. With that root on
    # `sys.path`, Python 3.14's own `compression` package would resolve to this file: step aside.
    import os

    __path__ = [os.path.join(os.path.dirname(os.__file__), "compression")]
