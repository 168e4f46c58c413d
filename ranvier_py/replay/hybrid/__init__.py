"""Prefix caches of hybrid models, which have recurrent layers: their state can be reused only where it was kept."""
