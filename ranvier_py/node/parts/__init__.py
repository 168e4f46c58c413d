"""The parts of a node that core, proxy and io have no module for: one module each."""
