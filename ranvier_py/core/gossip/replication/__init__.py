"""What was learned, told to all; `route_gossip` composes the rest."""
