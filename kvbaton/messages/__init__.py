"""Every message that crosses a socket between our processes: typed, versioned, bounded.

Nothing is pickled.
"""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions of msgspec for bytes that can't be decoded, including bad UTF-8 and deep nesting."""
OTHER_TYPES = (AttributeError, LookupError, TypeError)
"""Exceptions of code that reads decoded JSON of another shape than it expects."""
