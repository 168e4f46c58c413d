"""Prometheus and its tool, where they are (Debian's package `prometheus`)."""

from __future__ import annotations

import shutil
import subprocess

import pytest

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on this machine")
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not on this machine")


TIMEOUT_S = 200.0  # on a machine that is busy with something else; two seconds on others


def promtool(*words: str, text: str = "") -> str:
    """What it finds wrong; "" if nothing."""
    command = ["promtool", *words]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    return done.stdout + done.stderr if done.returncode or done.stderr else ""
