"""The Python API: an engine for your own program, without HTTP and without hand-overs."""
