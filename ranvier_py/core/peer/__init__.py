"""A node among its peers: what binds route table and registry to gossip."""
