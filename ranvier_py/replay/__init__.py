"""`ranvier replay` sends the requests of a trace through the real router to modelled engines, in virtual time.

All modules but `replay_command`, `lint_command`, `jobs` and the loaders of traces are pure. No serving node uses them.
"""
