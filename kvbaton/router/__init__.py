"""One endpoint in front of all nodes."""
