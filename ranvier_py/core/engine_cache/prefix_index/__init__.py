"""Continuum's tier 4 index: prefix hash -> which backend holds how many tokens of it, alone or shared through Redis."""
