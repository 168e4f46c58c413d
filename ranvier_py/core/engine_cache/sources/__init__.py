"""What engines and workers say of their caches, one module for each wire format."""
