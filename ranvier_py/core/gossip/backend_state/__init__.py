"""What peers know of backends, and what the operator commands."""
