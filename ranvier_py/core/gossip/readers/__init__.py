"""Engines' event streams among peers: who reads which one, and copies of what an engine holds."""
