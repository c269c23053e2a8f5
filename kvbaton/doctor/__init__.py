"""``kvbaton doctor``: tests each transport on this machine and reports what is slow, and why."""
