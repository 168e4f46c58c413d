"""The gossip port: sockets, time and the state file around the pure gossip core."""
