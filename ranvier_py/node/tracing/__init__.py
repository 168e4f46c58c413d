"""Traces requests: makes their spans at their end and sends them to a collector."""
