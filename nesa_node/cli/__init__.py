"""The command line. Heavy libraries are imported only when a command needs them."""
