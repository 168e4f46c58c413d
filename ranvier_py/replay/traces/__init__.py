"""Traces: one loader for each file format. All of them produce TraceRequests."""
