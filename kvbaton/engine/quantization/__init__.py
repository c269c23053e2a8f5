"""Weights in fewer bits: what checkpoints say of them, how they are read, and multiplied."""
