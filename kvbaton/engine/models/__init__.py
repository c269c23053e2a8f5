"""Models: decoders, most families in one frame, and vision towers."""
