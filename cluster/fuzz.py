"""`python -m cluster fuzz`: arbitrary bytes into every reader of gossip, steered by which code they reach (atheris).

    python -m cluster fuzz --for 60              one minute; exit code 0: nothing was found
    python -m cluster fuzz --input crash-1234    one kept input again

`make soak` installs atheris, which nothing else needs. What it finds it writes to a file whose name it says.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

INPUT_BYTES_MAX = 4096
INSTRUMENTED = ["ranvier_py.core.gossip"]


def main(argv: list[str]) -> int:
    """Exit code; without atheris 2."""
    parser = argparse.ArgumentParser(prog="python -m cluster fuzz", description="arbitrary bytes into gossip's readers")
    parser.add_argument("--for", dest="for_s", type=int, default=60, help="seconds")
    parser.add_argument("--input", type=Path, help="only this one, kept from an earlier run")
    options = parser.parse_args(argv)
    if options.input is not None:
        import_module("cluster.fuzz_targets").check(options.input.read_bytes())
        return 0
    try:
        atheris: Any = import_module("atheris")
    except ImportError:
        print("fuzz: atheris is not installed: pip install atheris", file=sys.stderr)
        return 2
    with atheris.instrument_imports(include=INSTRUMENTED):
        targets = import_module("cluster.fuzz_targets")
    with tempfile.TemporaryDirectory() as corpus:
        for number, data in enumerate(targets.beginnings()):
            (Path(corpus) / str(number)).write_bytes(data)
        limits = [f"-max_total_time={options.for_s}", f"-max_len={INPUT_BYTES_MAX}", "-verbosity=0"]
        atheris.Setup(["fuzz", *limits, corpus], targets.check)
        atheris.Fuzz()  # ends the process: 0, or 77 for what it found
    return 0
