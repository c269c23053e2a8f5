"""The source of hand-overs: computes prompts for others (`kvbaton.roles` says which nodes do)."""
