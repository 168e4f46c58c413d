"""Prefix caches of hybrid models: attention beside recurrent layers, whose state is reusable only where it was kept."""
