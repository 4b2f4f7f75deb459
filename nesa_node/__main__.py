"""`python -m nesa_node` is the `nesa-node` command."""

from nesa_node.cli.app import main

main()
