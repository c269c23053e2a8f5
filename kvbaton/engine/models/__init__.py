"""Models: the decoders' one frame, and a readable file for each family of vision towers."""
