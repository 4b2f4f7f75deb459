"""One request's tokens: prompts read, next tokens chosen, text and log probabilities of them."""
