"""`python -m cluster COMMAND ...` runs a command of the lab: `main(argv)` of its module, imported only when needed."""

from __future__ import annotations

import sys
from importlib import import_module

COMMANDS = {
    "chaos": "scenarios on real processes: kills, pauses, cuts, with every request in the books",
    "chats": "write the lab's own chats as a trace",
    "collector": "a collector of OpenTelemetry's traces that prints each as a tree",
    "engine": "one fake engine: vLLM's HTTP, a block cache, prefill and decode in real time",
    "fuzz": "arbitrary bytes into everything that reads gossip, steered by coverage (atheris)",
    "hostile": "what nobody should send, to every port of a real node, from both sides of each",
    "load": "multi-turn chats against a router or an engine, with a report by engine truth",
    "pages": "makes what is made of other files anew: plain manifests, tables, pictures (--check compares)",
    "sim": "whole clusters in virtual time from a seed, with faults and checkers; replays and shrinks what fails",
    "up": "nodes behind DNS round-robin, engines, and traffic, with a live table",
    "upgrade": "a cluster of the previous protocol version, upgraded under load node by node",
}

MODULES = {
    "chaos": "processes.chaos",
    "chats": "load.chats",
    "collector": "collector",
    "engine": "engine.engine_process",
    "fuzz": "fuzz",
    "hostile": "hostile",
    "load": "load.load_command",
    "pages": "pages.pages",
    "sim": "simulation.simulate",
    "up": "demo.up",
    "upgrade": "processes.upgrade",
}


def main(argv: list[str]) -> int:
    """Run a command and return its exit code; 2 for an unknown or missing command."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python -m cluster COMMAND ... (each has --help)\n")
        print("\n".join(f"  {name:<9} {meaning}" for name, meaning in COMMANDS.items()))
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        print(f"no command {argv[0]!r}; there are: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    result = import_module(f"cluster.{MODULES[argv[0]]}").main(argv[1:])
    return int(result or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
