"""Sealed packets: AES-256-GCM-SIV under a key of the sender's session, derived from the cluster's key.

    subkey  HKDF-SHA256(cluster key, salt = session, info = label | BASE_VERSION)
    nonce   4 plane | 8 counter: one counter serves all planes      AAD  header | label

Rules: a session is a fresh random number in each run, so a restart can't repeat a nonce. A copy of a machine can: in
GCM-SIV (RFC 8452) that only shows whether two packets are equal. `open` finds out who sealed a packet, not whether that
was just now (`sessions`). A subkey is kept once a packet has proved it, so strangers can't fill the table.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCMSIV
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.mesh.mesh_values import DATAGRAM_BYTES_MAX, FRAME_BYTES_MAX, Plane
from ranvier_py.core.mesh.wire.frame import (
    BASE_VERSION,
    HEADER,
    INNER,
    MAGIC,
    OVERHEAD_BYTES,
    PROTOCOL_VERSION,
    SPOKEN,
    BadFrame,
    Reason,
)
from ranvier_py.core.mesh.wire.keyring import KEY_BYTES, KeyRing

NONCE = Struct("<IQ")
SUBKEYS_MAX = 4096  # 2.5 KiB each; as many as known sessions (`sessions`). The one used longest ago goes first.
BYTES_MAX = (DATAGRAM_BYTES_MAX, *(FRAME_BYTES_MAX,) * (len(Plane) - 1))  # largest packet by plane
BODY_BYTES_MAX = tuple(most - OVERHEAD_BYTES for most in BYTES_MAX)  # largest body by plane
INSECURE_MARK = b"insecure\x00"
LABEL_BYTES_MAX = 64


class Opened(NamedTuple):
    """An opened packet: its sender has the cluster's key. Whether it is fresh, and for us, is not checked yet."""

    session: int
    plane: Plane
    counter: int
    receiver: int
    kind: int
    body: bytes
    key_id: int
    version: int = PROTOCOL_VERSION  # in which the body is written


class Subkeys(BoundedDict[tuple[bytes, bytes, int], AESGCMSIV]):
    """Ciphers by cluster key, label and session. Several sealers of one process may share one (the simulator does)."""

    def __init__(self, make: Callable[[bytes], AESGCMSIV] = AESGCMSIV, entries_max: int = SUBKEYS_MAX) -> None:
        super().__init__(entries_max)
        self._make = make
        self.derived = 0

    def known(self, key: bytes, label: bytes, session: int) -> AESGCMSIV | None:
        """Return the cipher if it was kept, and mark it as used last; None otherwise."""
        cipher = self.get((key, label, session))
        if cipher is not None:
            self.move_to_end((key, label, session))
        return cipher

    def derive(self, key: bytes, label: bytes, session: int) -> AESGCMSIV:
        self.derived += 1
        info = label + bytes((BASE_VERSION,))
        hkdf = HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=session.to_bytes(8, "little"), info=info)
        return self._make(hkdf.derive(key))


class Sealer:
    """Makes the packets of one session and opens those of all others of the cluster called `label`.

    `session` is a number that was never used before, not 0. The label tells clusters with one key apart.
    """

    def __init__(self, session: int, ring: KeyRing, label: str, subkeys: Subkeys | None = None) -> None:
        assert session > 0
        name = label.encode()
        if len(name) > LABEL_BYTES_MAX:
            raise ValueError("the cluster's label has at most 64 bytes")
        self.session = session
        self._name = name
        self._counter = 0
        self._subkeys = Subkeys() if subkeys is None else subkeys
        self.sealed: dict[int, int] = {}
        self.opened: dict[int, int] = {}
        self.refused: dict[str, int] = {reason.value: 0 for reason in Reason}
        self._use(ring)

    def rekey(self, ring: KeyRing) -> None:
        """Seal with this ring's primary key from now on, and open with its keys alone. The counter goes on."""
        self._subkeys.clear()
        self._use(ring)

    def _use(self, ring: KeyRing) -> None:
        self._ring = ring
        self._label = INSECURE_MARK + self._name if ring.insecure else self._name
        self._own = self._subkeys.derive(ring.keys[ring.primary], self._label, self.session)
        for key_id in ring.keys:
            self.sealed.setdefault(key_id, 0)
            self.opened.setdefault(key_id, 0)

    def seal(self, plane: Plane, receiver: int, kind: int, body: bytes, version: int = PROTOCOL_VERSION) -> bytes:
        """Return the packet. `receiver` is a session, 0 for any; `version` that of the body. Raises ValueError when the
        body is too long."""
        if len(body) > BODY_BYTES_MAX[plane]:
            raise ValueError(f"a body of {len(body)} bytes is too long for {plane.name}")
        self._counter += 1
        key_id = self._ring.primary
        self.sealed[key_id] += 1
        header = HEADER.pack(MAGIC, version, key_id, self.session, plane, self._counter)
        nonce = NONCE.pack(plane, self._counter)
        return header + self._own.encrypt(nonce, INNER.pack(receiver, kind) + body, header + self._label)

    def open(self, packet: bytes, plane: Plane) -> Opened:
        """Return the content of a packet that came by `plane`. Counts and raises BadFrame for one that is refused."""
        try:
            opened = self._open(packet, plane)
        except BadFrame as bad:
            self.refused[bad.reason] += 1
            raise
        self.opened[opened.key_id] += 1
        return opened

    def _open(self, packet: bytes, plane: Plane) -> Opened:
        if len(packet) < OVERHEAD_BYTES:
            raise BadFrame(Reason.SHORT)
        magic, version, key_id, session, sealed_for, counter = HEADER.unpack_from(packet)
        if magic != MAGIC or not session:
            raise BadFrame(Reason.MAGIC)
        if version not in SPOKEN:
            raise BadFrame(Reason.VERSION, str(version))
        if sealed_for != plane:
            raise BadFrame(Reason.PLANE)
        if len(packet) > BYTES_MAX[plane]:
            raise BadFrame(Reason.SIZE)
        key = self._ring.keys.get(key_id)
        if key is None:
            raise BadFrame(Reason.KEY, str(key_id))
        known = self._subkeys.known(key, self._label, session)
        cipher = self._subkeys.derive(key, self._label, session) if known is None else known
        try:
            associated = packet[: HEADER.size] + self._label
            plain = cipher.decrypt(NONCE.pack(plane, counter), packet[HEADER.size :], associated)
        except InvalidTag:
            raise BadFrame(Reason.TAG) from None
        if known is None:
            self._subkeys[key, self._label, session] = cipher
        receiver, kind = INNER.unpack_from(plain)
        return Opened(session, plane, counter, receiver, kind, plain[INNER.size :], key_id, version)
