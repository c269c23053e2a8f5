"""The Python API: an engine inside your own program, without HTTP and without hand-overs."""
