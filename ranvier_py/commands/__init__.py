"""The commands of `ranvier`: `run_NAME` has `add_flags` and `run`, which returns an exit code (`exit_codes`).

The command line imports the module of the command that is called, and no other. Each imports only what it needs, and
what takes long (a node, a replay) only when it runs, not for `--help`.
"""
