"""What a node does to know what its engines hold."""
