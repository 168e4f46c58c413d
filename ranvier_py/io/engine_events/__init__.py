"""Engines' event streams: ZeroMQ, server-sent events, and where they are published."""
