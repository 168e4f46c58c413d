"""Data-parallel ranks of engines, each placed as a backend of its own."""
