"""The transfer thread: the thread that carries out what the hand-over's state machines decide."""
