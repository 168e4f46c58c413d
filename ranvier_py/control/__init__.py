"""The control port: routes, status and metrics of one node."""
