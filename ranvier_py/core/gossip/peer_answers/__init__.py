"""Stored answers among peers: who has which, one of them to whoever lacks it, and what of them is void."""
