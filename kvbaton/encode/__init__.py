"""The encoder role."""
