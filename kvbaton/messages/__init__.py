"""Every message that crosses a socket between our processes: typed, versioned, bounded.

Nothing is pickled.
"""
