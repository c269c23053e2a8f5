"""Encoder outputs as blocks: an engine whose prompts are items."""
