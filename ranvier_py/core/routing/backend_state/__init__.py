"""What peers know of backends, and the commands of the operator that all nodes follow."""
