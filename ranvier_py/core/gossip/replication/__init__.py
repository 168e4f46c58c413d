"""What each node learned, sent to all others; `route_gossip` composes the parts."""
