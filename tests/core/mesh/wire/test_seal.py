"""Packets: what opens, what does not and why, and that no nonce is used twice."""

from __future__ import annotations

from random import Random

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCMSIV
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.mesh.mesh_values import DATAGRAM_BYTES_MAX, FRAME_BYTES_MAX, Plane
from ranvier_py.core.mesh.wire.frame import HEADER, MAGIC, OVERHEAD_BYTES, PROTOCOL_VERSION, SPOKEN, BadFrame, Reason
from ranvier_py.core.mesh.wire.keyring import KeyRing, insecure_ring
from ranvier_py.core.mesh.wire.seal import BODY_BYTES_MAX, BYTES_MAX, Sealer, Subkeys
from tests.examples import examples

OLD, NEW, OTHER = (bytes((number,)) + bytes(range(31)) for number in (1, 2, 3))
RING = KeyRing({5: OLD}, 5)

Nonce = tuple[bytes, bytes]


class Recording:
    """AES-GCM-SIV that writes down under which key which nonce was used."""

    def __init__(self) -> None:
        self.used: list[Nonce] = []

    def __call__(self, key: bytes) -> Recorded:
        return Recorded(key, self.used)


class Recorded:
    def __init__(self, key: bytes, used: list[Nonce]) -> None:
        self._key, self._used, self._cipher = key, used, AESGCMSIV(key)

    def encrypt(self, nonce: bytes, data: bytes, associated_data: bytes) -> bytes:
        self._used.append((self._key, nonce))
        return self._cipher.encrypt(nonce, data, associated_data)

    def decrypt(self, nonce: bytes, data: bytes, associated_data: bytes) -> bytes:
        return self._cipher.decrypt(nonce, data, associated_data)


def sealer(session: int = 1, ring: KeyRing = RING, label: str = "prod") -> Sealer:
    return Sealer(session, ring, label)


def refusal(reader: Sealer, packet: bytes, plane: Plane = Plane.DATAGRAM) -> Reason:
    before = dict(reader.refused)
    with pytest.raises(BadFrame) as caught:
        reader.open(packet, plane)
    assert reader.refused[caught.value.reason] == before[caught.value.reason] + 1
    return caught.value.reason


@settings(max_examples=examples(60))
@given(
    st.integers(1, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 255), st.binary(), st.sampled_from(Plane)
)  # fmt: skip
def test_what_one_session_seals_another_opens(session: int, to: int, kind: int, body: bytes, plane: Plane) -> None:
    writer, reader = sealer(session), sealer(2)
    for counter in (1, 2):
        packet = writer.seal(plane, to, kind, body)
        assert len(packet) == len(body) + OVERHEAD_BYTES
        opened = reader.open(packet, plane)
        assert opened == (session, plane, counter, to, kind, body, 5, PROTOCOL_VERSION)
    assert (writer.sealed, reader.opened) == ({5: 2}, {5: 2})


def test_the_body_is_not_in_the_packet() -> None:
    assert b"secret" not in sealer().seal(Plane.DATAGRAM, 0, 1, b"a secret body")


@pytest.mark.parametrize("plane", Plane)
def test_a_flipped_bit_anywhere_is_noticed(plane: Plane) -> None:
    packet = sealer(3).seal(plane, 9, 16, b"some body")
    reader = sealer(2)
    reader.open(packet, plane)
    for bit in range(8 * len(packet)):
        spoilt = bytearray(packet)
        spoilt[bit // 8] ^= 1 << bit % 8
        reason = refusal(reader, bytes(spoilt), plane)
        where = (MAGIC, MAGIC, "major", "key")[bit // 8] if bit < 32 else "plane" if bit // 8 == 12 else "sealed"
        version = Reason.TAG if spoilt[2] in SPOKEN else Reason.VERSION
        expected = {MAGIC: Reason.MAGIC, "major": version, "key": Reason.KEY, "plane": Reason.PLANE}
        assert reason is expected.get(where, Reason.TAG), bit
    assert reader.open(packet, plane).body == b"some body"


def test_a_packet_cut_off_at_any_byte_is_refused() -> None:
    packet = sealer().seal(Plane.DATAGRAM, 9, 16, b"some body")
    reader = sealer(2)
    for end in range(len(packet)):
        assert refusal(reader, packet[:end]) is (Reason.SHORT if end < OVERHEAD_BYTES else Reason.TAG)
    assert refusal(reader, packet + b"\x00") is Reason.TAG


@settings(max_examples=examples(200))
@given(st.binary(max_size=100), st.sampled_from(Plane))
def test_arbitrary_bytes_are_refused_and_leave_nothing_behind(data: bytes, plane: Plane) -> None:
    """Also behind a header of ours: a stranger without the key must not fill the table of subkeys."""
    subkeys = Subkeys()
    reader = Sealer(2, RING, "prod", subkeys)
    for start in (b"", MAGIC, HEADER.pack(MAGIC, PROTOCOL_VERSION, 5, 7, plane, 1)):
        refusal(reader, start + data, plane)
    assert len(subkeys) == 0


def test_reasons_of_refusal_are_reported_apart() -> None:
    reader = sealer(2)
    packet = sealer().seal(Plane.PROBE, 9, 16, b"body")
    assert refusal(reader, packet[:-1], Plane.PROBE) is Reason.TAG
    assert refusal(reader, b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n") is Reason.MAGIC
    assert refusal(reader, packet[:2] + b"\x01" + packet[3:], Plane.PROBE) is Reason.VERSION
    assert refusal(sealer(2, KeyRing({6: OLD}, 6)), packet, Plane.PROBE) is Reason.KEY
    assert refusal(sealer(2, KeyRing({5: NEW}, 5)), packet, Plane.PROBE) is Reason.TAG
    nobody = HEADER.pack(MAGIC, PROTOCOL_VERSION, 5, 0, Plane.PROBE, 1)
    assert refusal(reader, nobody + packet[HEADER.size :], Plane.PROBE) is Reason.MAGIC


@pytest.mark.parametrize("came_by", Plane)
@pytest.mark.parametrize("sealed_for", Plane)
def test_a_packet_passes_only_on_the_plane_it_was_sealed_for(sealed_for: Plane, came_by: Plane) -> None:
    packet = sealer().seal(sealed_for, 9, 16, b"body")
    if sealed_for is came_by:
        assert sealer(2).open(packet, came_by).plane is came_by
    else:
        assert refusal(sealer(2), packet, came_by) is Reason.PLANE


# --- clusters ---------------------------------------------------------------------------------------------------------


def test_two_clusters_with_one_key_and_two_labels_do_not_understand_each_other() -> None:
    """grafana/mimir#6187: clusters merged when addresses of pods were used again."""
    packet = sealer(label="tenant-a/prod").seal(Plane.DATAGRAM, 0, 1, b"hello")
    assert refusal(sealer(2, label="tenant-b/prod"), packet) is Reason.TAG
    assert refusal(sealer(2, label=""), packet) is Reason.TAG
    assert sealer(2, label="tenant-a/prod").open(packet, Plane.DATAGRAM).body == b"hello"


def test_a_label_is_reported_even_from_bytes_moved_between_it_and_the_packet() -> None:
    """AAD is header | label: its border is fixed, because the header has one length."""
    packet = sealer(label="ab").seal(Plane.DATAGRAM, 0, 1, b"")
    assert refusal(sealer(2, label="b"), packet) is Reason.TAG
    with pytest.raises(ValueError, match="64 bytes"):
        sealer(label="ä" * 33)


def test_a_cluster_without_a_key_and_one_with_a_key_do_not_understand_each_other() -> None:
    bare, keyed = sealer(1, insecure_ring()), sealer(2)
    assert refusal(keyed, bare.seal(Plane.DATAGRAM, 0, 1, b"")) is Reason.KEY
    assert refusal(bare, keyed.seal(Plane.DATAGRAM, 0, 1, b"")) is Reason.KEY
    assert sealer(3, insecure_ring()).open(bare.seal(Plane.DATAGRAM, 0, 1, b"x"), Plane.DATAGRAM).body == b"x"
    zero = KeyRing({0: bytes(32), 5: OLD}, 5)  # what no key file makes: even then the mark of the label tells
    assert refusal(sealer(4, zero), bare.seal(Plane.DATAGRAM, 0, 1, b"")) is Reason.TAG


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plane", Plane)
def test_packets_are_bounded_by_their_plane_on_both_sides(plane: Plane) -> None:
    most = BODY_BYTES_MAX[plane]
    assert BYTES_MAX[plane] == (DATAGRAM_BYTES_MAX if plane is Plane.DATAGRAM else FRAME_BYTES_MAX)
    packet = sealer().seal(plane, 9, 16, bytes(most))
    assert len(packet) == BYTES_MAX[plane]
    assert sealer(2).open(packet, plane).body == bytes(most)
    assert refusal(sealer(2), packet + b"\x00", plane) is Reason.SIZE
    with pytest.raises(ValueError, match="too long"):
        sealer().seal(plane, 9, 16, bytes(most + 1))


# --- keys -------------------------------------------------------------------------------------------------------------


def test_keys_are_rotated_under_load_without_a_lost_packet() -> None:
    """memberlist#341/#342. Every node changes its ring at another time, packets under way all the time."""
    rng = Random(7)
    add, switch, drop = KeyRing({5: OLD, 6: NEW}, 5), KeyRing({6: NEW, 5: OLD}, 6), KeyRing({6: NEW}, 6)
    nodes = [sealer(session) for session in range(1, 6)]
    flying: list[tuple[bytes, bytes]] = []

    def deliver() -> None:
        rng.shuffle(flying)
        while flying:
            packet, body = flying.pop()
            assert all(node.open(packet, Plane.DATAGRAM).body == body for node in nodes)

    for ring in (add, switch, drop):
        seen_before = [node.opened[5] for node in nodes]
        for node in rng.sample(nodes, len(nodes)):
            for other in rng.sample(nodes, len(nodes)):
                body = rng.randbytes(9)
                flying.append((other.seal(Plane.DATAGRAM, 0, 20, body), body))
            if rng.random() < 0.5:
                deliver()
            node.rekey(ring)
        deliver()
    assert [node.opened[5] for node in nodes] == seen_before  # so it was safe to drop it
    assert [(node.opened[5], node.opened[6]) for node in nodes] == [(40, 35)] * len(nodes)
    assert all(not any(node.refused.values()) for node in nodes)
    assert refusal(nodes[0], sealer(9).seal(Plane.DATAGRAM, 0, 20, b"late")) is Reason.KEY


@settings(max_examples=examples(30))
@given(st.lists(st.sampled_from(["datagram", "probe", "bulk", "restart", "rekey"]), max_size=40), st.integers())
def test_no_key_ever_sees_a_nonce_twice(actions: list[str], seed: int) -> None:
    """stalwartlabs/jmap-server#3. Over planes, restarts and rotations there and back, with nothing stored on disk."""
    rng, recording = Random(seed), Recording()
    rings = [RING, KeyRing({6: NEW, 5: OLD}, 6), KeyRing({5: OLD, 6: NEW}, 5), KeyRing({9: OLD}, 9)]

    def run() -> Sealer:
        return Sealer(rng.getrandbits(64) or 1, rings[0], "prod", Subkeys(recording))

    node = run()
    for action in actions:
        if action == "restart":
            node = run()
        elif action == "rekey":
            node.rekey(rng.choice(rings))
        else:
            node.seal(Plane[action.upper()], rng.choice((0, 5)), 20, b"body")
    assert len(set(recording.used)) == len(recording.used)
    assert len(recording.used) == sum(action not in ("restart", "rekey") for action in actions)


def test_a_copy_of_a_machine_that_goes_on_beside_it_gives_nothing_away() -> None:
    """Both have the session, the key and the counter. In GCM the ciphertexts differ where, and as, the texts do."""
    one, copy = sealer(1), sealer(1)
    texts = b"what the machine sends   ", b"what its copy sends later"
    packets = [node.seal(Plane.DATAGRAM, 7, 20, text) for node, text in zip((one, copy), texts, strict=True)]
    assert packets[0][: HEADER.size] == packets[1][: HEADER.size]
    sealed = [packet[HEADER.size :] for packet in packets]
    difference = bytes(a ^ b for a, b in zip(*sealed, strict=True))
    assert bytes(a ^ b for a, b in zip(*texts, strict=True)) not in difference
    assert [sealer(2).open(packet, Plane.DATAGRAM).body for packet in packets] == list(texts)


def test_each_session_has_a_key_of_its_own() -> None:
    """Else two nodes would both use counter 1 under one key. It depends on key, session, label and nothing else."""
    recording = Recording()
    for session, label, ring in ((1, "a", RING), (2, "a", RING), (1, "b", RING), (1, "a", KeyRing({5: NEW}, 5))):
        Sealer(session, ring, label, Subkeys(recording)).seal(Plane.DATAGRAM, 0, 1, b"")
    assert len({key for key, _ in recording.used}) == 4
    assert {nonce for _, nonce in recording.used} == {bytes(4) + (1).to_bytes(8, "little")}
    again = Recording()
    Sealer(1, RING, "a", Subkeys(again)).seal(Plane.DATAGRAM, 0, 1, b"")
    assert again.used[0] == recording.used[0]


def test_subkeys_are_bounded_and_the_one_used_longest_ago_goes_first() -> None:
    subkeys = Subkeys(entries_max=3)
    reader = Sealer(99, RING, "prod", subkeys)
    packets = {session: sealer(session).seal(Plane.DATAGRAM, 0, 1, b"") for session in range(1, 6)}
    for session in (1, 2, 3, 1, 4, 1, 5):
        reader.open(packets[session], Plane.DATAGRAM)
    assert (len(subkeys), subkeys.dropped) == (3, 2)
    derived = subkeys.derived
    for session in (1, 4, 5):
        reader.open(packets[session], Plane.DATAGRAM)
    assert subkeys.derived == derived
    reader.open(packets[2], Plane.DATAGRAM)
    assert subkeys.derived == derived + 1


def test_nodes_of_one_process_may_share_their_subkeys() -> None:
    """The simulator does: a thousand nodes derive each session's key once. What they must not see, they still don't."""
    subkeys = Subkeys()
    one, two = Sealer(1, RING, "prod", subkeys), Sealer(2, RING, "prod", subkeys)
    stranger = Sealer(3, RING, "test", subkeys)
    packet = one.seal(Plane.DATAGRAM, 0, 1, b"body")
    assert two.open(packet, Plane.DATAGRAM).body == b"body"
    assert refusal(stranger, packet) is Reason.TAG
