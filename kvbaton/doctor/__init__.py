"""``kvbaton doctor``: tries each transport on this machine and tells what is slow, and why."""
