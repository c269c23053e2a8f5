"""The target of hand-overs: receives prompts and decodes from them."""
