"""Engines that hang with requests in flight."""
