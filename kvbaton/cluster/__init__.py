"""``kvbaton up``, a router and nodes started by one command; ``kvbaton chat`` and ``drain``."""
