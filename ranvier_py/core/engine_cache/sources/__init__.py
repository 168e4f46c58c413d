"""Reads what engines and workers report about their caches, with one module for each wire format."""
