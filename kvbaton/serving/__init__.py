"""The HTTP face of a node."""
