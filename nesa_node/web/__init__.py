"""What pages and endpoints share: listening, and who may ask."""
