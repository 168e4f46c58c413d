"""Messages as bytes: the messages, their encoding, the packets that carry them, and the seal with its keys."""
