"""Which backends there shall be: what sources want, and what follows for the registry."""
