"""Traces: the context that comes with a request, spans with the names of a version of the conventions, and OTLP."""
