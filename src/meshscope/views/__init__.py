"""Tables and metrics drawn for people."""
