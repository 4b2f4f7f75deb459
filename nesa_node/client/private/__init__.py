"""Sessions whose nodes see no hidden states: they multiply encrypted vectors with their weights."""
