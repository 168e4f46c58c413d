"""Engines' event streams among peers: which nodes read each one, and snapshots of what an engine holds."""
