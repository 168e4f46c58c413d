"""Which processes answer behind the URL of a backend: restarts, names that move, several of them."""
