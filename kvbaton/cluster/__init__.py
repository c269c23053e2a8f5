"""``kvbaton up``: a router and nodes as child processes of one command."""
