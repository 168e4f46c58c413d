"""Replay: a trace through the real router and modelled engines, in virtual time. `ranvier replay`.

Pure but for `replay_command`, `jobs` and the loaders. Nothing here runs in a serving node.
"""
