"""A `docker` that runs nothing: it writes down what it is asked, and answers as FAKE_DOCKER (JSON) has it.

What image.sh sends into the node's container runs here, against the addresses that the test names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PLAN: dict[str, Any] = json.loads(os.environ["FAKE_DOCKER"])
LABELS = "org.opencontainers.image."


def built(name: str) -> str:
    """The build argument of that name, as it was given."""
    calls = [json.loads(line) for line in Path(PLAN["calls"]).read_text().splitlines()]
    (build,) = [call for call in calls if call[0] == "build"]
    (value,) = [word.partition("=")[2] for word in build if word.startswith(f"{name}=")]
    return str(value)


def answer(words: list[str]) -> int:
    with Path(PLAN["calls"]).open("a") as calls:
        calls.write(json.dumps(words) + "\n")
    match words:
        case ["info", *_]:
            return 0 if PLAN.get("engine", True) else 1
        case ["buildx", *_]:
            print(PLAN["digest"])
        case ["image", "inspect", "--format", text, _] if LABELS in text:
            name = text.partition(LABELS)[2].partition('"')[0]
            print(PLAN.get(name) or built(name.upper()))
        case ["image", "inspect", *_]:
            print("registry.test/ranvier@sha256:" + "d" * 8)
        case ["inspect", *_]:
            print(PLAN.get("health", "healthy"))
        case ["exec", "--interactive", *_]:
            program = sys.stdin.read()
            for inner, outer in PLAN["ports"].items():
                program = program.replace(inner, outer)
            return subprocess.run([sys.executable, "-c", program], check=False).returncode
        case ["exec", _, "id", "-u"]:
            print(PLAN.get("user", 65534))
        case ["exec", _, "touch", _]:
            return int(not PLAN.get("writable", False))
    return 0


if __name__ == "__main__":
    sys.exit(answer(sys.argv[1:]))
