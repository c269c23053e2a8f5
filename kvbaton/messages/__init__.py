"""Every message that crosses a socket between our processes: typed, versioned, bounded.

Nothing is pickled.
"""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are no message: also text that is not UTF-8, or too deep."""
OTHER_TYPES = (AttributeError, LookupError, TypeError)
"""What is raised where JSON that can be read holds something else than is looked for."""
