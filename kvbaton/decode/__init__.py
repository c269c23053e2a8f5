"""The decode role."""
