"""Prefix caches of hybrid models: where engines keep checkpoints, and from which of them a prompt can go on."""
