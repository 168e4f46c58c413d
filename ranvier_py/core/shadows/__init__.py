"""Policies in the shadow: each has a world of its own, with engines and caches as its choices would have left them."""
