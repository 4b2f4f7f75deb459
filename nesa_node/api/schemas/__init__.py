"""Schemas of request bodies, and the prompts and grammars made of them."""
