"""Messages as bytes: the codec, the frame, the seal and its keys."""
