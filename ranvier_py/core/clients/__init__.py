"""Which clients there are, and what they do to their own prefixes."""
