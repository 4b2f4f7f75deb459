"""What distance costs: one session through daemons that an emulated network keeps apart."""
