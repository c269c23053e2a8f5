"""The target of hand-overs: receives prompts and generates from them."""
