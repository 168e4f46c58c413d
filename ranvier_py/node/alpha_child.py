"""Runs one job of the tuner of route weights, in a process of its own: python -m ranvier_py.node.alpha_child

It reads a job from its input, replays it and writes the alpha. It gives way to every other process, and the kernel ends
it after CPU_S of processor time. It reads no text of a client, and prints nothing.
"""

from __future__ import annotations

import os
import resource
import sys
import time

from ranvier_py.core.routing.route_table.alpha_tuner import ANSWER, decode_job, found_alpha

CPU_S = 2
ENOUGH_S = 1.5  # after this no further alpha is tried, so that there is an answer
NICENESS = 10


def main() -> int:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    os.nice(NICENESS)
    job = decode_job(sys.stdin.buffer.read())
    sys.stdout.buffer.write(ANSWER.pack(found_alpha(job, lambda: time.process_time() > ENOUGH_S)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
