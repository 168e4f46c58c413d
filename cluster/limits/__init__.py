"""A limit over simulated clusters, and how it is measured."""
