"""Scenarios on real processes: nodes, engines, links, clients, and the outcome of every request."""
