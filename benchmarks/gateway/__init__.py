"""The gateway under load: streams that are not dropped or mixed up, and what HTTP adds to them."""
