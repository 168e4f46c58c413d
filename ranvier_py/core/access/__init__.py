"""Who asks, for whom, and how much: keys, tenants and limits."""
