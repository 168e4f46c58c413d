"""Limits: how much was used of each, on all nodes together, and what a request reserves."""
