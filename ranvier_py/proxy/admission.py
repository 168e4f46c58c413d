"""Who may come in: requests in flight and bytes of their bodies, counted and bounded.

Invariant: `in_flight` counts requests from their complete head to the end of their answer, and `in_flight_bytes` what
is here of their bodies; neither exceeds its limit.
"""

from __future__ import annotations

from ranvier_py.core.errors import NodeBusy
from ranvier_py.proxy.client_connection import Client
from ranvier_py.proxy.request_reader import ServerLimits
from ranvier_py.proxy.server_counters import Counters


class Admission:
    """`draining`: no request is taken after the one that runs."""

    def __init__(self, limits: ServerLimits, counters: Counters) -> None:
        self.limits = limits
        self.counters = counters
        self.in_flight = self.in_flight_bytes = 0
        self.draining = False

    def check(self, length: int) -> None:
        """Raises NodeBusy when there are too many, or no room for a body that is known to be so long.

        Room is not reserved: else a few clients could hold all of it by announcing what they never send.
        """
        if self.in_flight >= self.limits.in_flight_max:
            self.refused("in_flight")
            raise NodeBusy("too many requests at once")
        if length > 0:
            self._check_room(length)

    def has_room(self, length: int) -> bool:
        """Whether `check` would raise nothing."""
        limits = self.limits
        return self.in_flight < limits.in_flight_max and self.in_flight_bytes + length <= limits.in_flight_bytes_max

    def keep(self, client: Client, count: int) -> None:
        """So many more bytes of this client's body are in memory. Raises NodeBusy."""
        self._check_room(count)
        self.in_flight_bytes += count
        client.body_bytes += count

    def ended(self, client: Client) -> None:
        """This client's request is over, and its body gone."""
        self.in_flight_bytes -= client.body_bytes
        client.body_bytes = 0
        self.in_flight -= 1

    def _check_room(self, count: int) -> None:
        if self.in_flight_bytes + count > self.limits.in_flight_bytes_max:
            self.refused("in_flight_bytes")
            raise NodeBusy("too many bytes of requests at once")

    def refused(self, what: str) -> None:
        counts = self.counters.refused
        counts[what] = counts.get(what, 0) + 1
