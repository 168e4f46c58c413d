"""Predictions against what answers say: the router's own error, and how much an engine keeps."""
