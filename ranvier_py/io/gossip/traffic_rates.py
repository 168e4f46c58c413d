"""How much passes the gossip port just now, by plane: counters looked at once a second -> bytes per second.

Rules: the mean over the last WINDOW_S, or over as long as there is something to look back to. A look that comes late
makes its second longer, never a rate wrong.
Cost: a look each second, of six numbers; SAMPLES_MAX of them are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

LOOK_INTERVAL_S = 1.0
WINDOW_S = 10.0  # some ten rounds of probes and repair: an idle node's figure stands still
SAMPLES_MAX = int(WINDOW_S / LOOK_INTERVAL_S) + 1

Totals = Mapping[str, int]


class Rates:
    """Bytes per second by plane, each way. `now` in seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Totals, Totals]] = deque(maxlen=SAMPLES_MAX)

    def due(self, now: float) -> bool:
        return not self._samples or now >= self._samples[-1][0] + LOOK_INTERVAL_S

    def look(self, now: float, sent: Totals, received: Totals) -> None:
        """Take the counters' values; they are not kept by reference."""
        self._samples.append((now, dict(sent), dict(received)))

    def per_s(self, now: float, sent: Totals, received: Totals) -> dict[str, dict[str, float]]:
        """{plane: {"sent": …, "received": …}} by what the counters are now."""
        then, sent_then, received_then = self._samples[0] if self._samples else (now, sent, received)
        elapsed_s = max(now - then, LOOK_INTERVAL_S)
        return {
            plane: {
                "sent": round((sent[plane] - sent_then[plane]) / elapsed_s, 1),
                "received": round((received[plane] - received_then[plane]) / elapsed_s, 1),
            }
            for plane in sent
        }
