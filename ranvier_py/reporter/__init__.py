"""Reports to routers what one engine's cache holds: beside the engine (`ranvier reporter`) or as a hook inside it.

from ranvier_py.reporter.hook import EvictionReporter
"""
