"""A peer-to-peer cluster of cache-aware routers for LLM engines."""

__version__ = "0.1.0"
