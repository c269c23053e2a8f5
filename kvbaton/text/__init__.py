"""Text at the edge: tokenizing, templates, detokenizing, stop strings."""
