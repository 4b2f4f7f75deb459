"""What is run where: the spans that nodes take."""
