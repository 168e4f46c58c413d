"""What peers tell each other: membership, routes, backend facts, load."""
