"""What an engine is to a router: a block cache with a clock. Pure; the lab's fake engine drives the same code."""
