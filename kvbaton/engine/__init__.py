"""The engine that nodes of all roles share."""
