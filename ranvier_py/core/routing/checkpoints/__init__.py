"""What engines of hybrid models can reuse: where they keep checkpoints, and which of them a prompt can go on from."""
