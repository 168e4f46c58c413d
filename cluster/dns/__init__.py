"""Names: a DNS server with faults, resolvers for trio, and free addresses of this machine."""
