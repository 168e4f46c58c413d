"""Which sessions are live, and each packet taken once."""
