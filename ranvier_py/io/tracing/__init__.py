"""Sends spans to a collector."""
