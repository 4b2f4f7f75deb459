"""What the network looks like at one time."""
