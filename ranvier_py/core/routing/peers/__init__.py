"""Route updates: how what each node learns reaches all others; `route_gossip` composes the parts."""
