"""The client-facing HTTP endpoint over any source of tokens; nodes and router share it."""
