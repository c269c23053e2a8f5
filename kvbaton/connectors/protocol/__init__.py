"""The hand-over protocol: one sans-IO state machine per side."""
