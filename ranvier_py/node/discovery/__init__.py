"""Finds engines: sources of backends, and what carries out what they want."""
