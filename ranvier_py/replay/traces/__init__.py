"""Traces: one loader for each format, all giving TraceRequest."""
