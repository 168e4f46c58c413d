"""`python -m cluster fuzz` feeds arbitrary bytes to every reader of gossip, guided by code coverage (atheris).

    python -m cluster fuzz --for 60              one minute; exit code 0: nothing was found
    python -m cluster fuzz --input crash-1234    run one kept input again

`make soak` installs atheris, which nothing else needs. It writes an input that fails to a file and prints its name.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

INPUT_BYTES_MAX = 4096
INSTRUMENTED = ["ranvier_py.core.mesh", "ranvier_py.core.peer"]


def main(argv: list[str]) -> int:
    """Run the fuzzer and return the exit code; 2 without atheris."""
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
        atheris.Fuzz()  # ends the process with code 0, or 77 if an input failed
    return 0
