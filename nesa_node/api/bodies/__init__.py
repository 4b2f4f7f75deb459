"""What requests may ask, and the prompts that it makes."""
