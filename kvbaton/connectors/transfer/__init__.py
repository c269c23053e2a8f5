"""The transfer thread, which carries out the actions of the hand-over's state machines."""
