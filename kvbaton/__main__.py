"""``python -m kvbaton`` works like ``kvbaton``."""

import sys

from kvbaton.cli import main

sys.exit(main())
