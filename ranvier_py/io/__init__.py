"""The edges: each file touches one part of the world with one foreign library. No edge imports another."""
