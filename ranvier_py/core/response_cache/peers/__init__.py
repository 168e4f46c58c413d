"""Stored answers among peers: who has which, fetching one from a peer that has it, and which are void."""
