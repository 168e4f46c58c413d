"""Entry for a fuzzer: whatever the bytes, reading them ends in a message or in BadFrame.

The first byte is the kind, the rest the body. Bytes that are a message are written again and must say the same. Run
`python tests/core/gossip/wire/fuzz_wire.py CORPUS` where atheris is installed; the suite calls `one_input` itself.
"""

from __future__ import annotations

import importlib
import sys

from ranvier_py.core.gossip.gossip_values import Plane
from ranvier_py.core.gossip.wire.codec import decode, encode
from ranvier_py.core.gossip.wire.frame import BadFrame
from ranvier_py.core.gossip.wire.keyring import KeyRing
from ranvier_py.core.gossip.wire.seal import Sealer

SEALER = Sealer(1, KeyRing({7: bytes(range(32))}, 7), "fuzz")


def one_input(data: bytes) -> None:
    """Raises if the codec breaks its promise."""
    for plane in Plane:
        try:
            SEALER.open(data, plane)
        except BadFrame:
            pass
        else:
            raise AssertionError("opened what nobody sealed")
    if not data:
        return
    try:
        message = decode(data[0], data[1:])
    except BadFrame:
        return
    kind, body = encode(message)
    assert kind == data[0]
    assert decode(kind, body) == message


def main() -> None:
    atheris = importlib.import_module("atheris")
    atheris.instrument_all()
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
