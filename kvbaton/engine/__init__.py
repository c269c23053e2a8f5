"""The core that both roles share."""
