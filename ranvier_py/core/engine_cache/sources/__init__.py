"""What engines and workers report of their caches, one module for each wire format."""
