"""Scenarios on real processes: nodes, engines, links, clients, and what became of every request."""
