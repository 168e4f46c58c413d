"""Posts spans to a collector: OTLP/JSON over HTTP, with httpx, in a thread of its own.

Why not OpenTelemetry's SDK: its exporter brings threads, a global provider and requests' sessions, and makes an object
for each attribute on the event loop; what it would do for us is this page and `core/tracing/span.py`.
Rule: encoding, compression, TLS and waiting happen in the thread that calls `send`, never on the loop. No redirects,
nothing from the environment. Bound: ANSWER_BYTES_MAX of an answer.
"""

from __future__ import annotations

import gzip
import json
import ssl
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import NamedTuple

import httpx

from ranvier_py.core.errors import words_of
from ranvier_py.core.tracing.span import Attribute, TraceSpan, request_of

ANSWER_BYTES_MAX = 64 * 1024
COMPRESS_LEVEL = 1  # of gzip: names repeat in every span, so more saves little
RETRIED = frozenset((429, 502, 503, 504))
"""Statuses after which the same batch may be sent again (OTLP/HTTP, "Retryable Response Codes")."""


class Sent(NamedTuple):
    """What became of one batch. `trouble`: "" if it was taken. `rejected`: how many spans of it were not."""

    trouble: str = ""
    may_repeat: bool = False
    retry_after_s: float = 0.0
    rejected: int = 0


class OtlpSender:
    """One collector. Raises OSError, ssl.SSLError for files of TLS that can't be used."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        ca_file: Path | None,
        certificate: tuple[Path, Path] | None,
        *,
        timeout_s: float,
        is_compressed: bool,
    ) -> None:
        context: ssl.SSLContext | bool = True
        if url.startswith("https") or ca_file or certificate:
            context = ssl.create_default_context(cafile=ca_file)
            if certificate is not None:
                context.load_cert_chain(*certificate)
        own = {"content-type": "application/json", "user-agent": "ranvier", "accept": "application/json"}
        packed = {"content-encoding": "gzip"} if is_compressed else {}
        self._url, self._is_compressed = url, is_compressed
        self._client = httpx.Client(
            headers={**headers, **own, **packed}, verify=context, timeout=timeout_s, trust_env=False
        )

    def send(
        self, spans: Sequence[TraceSpan], resource: Mapping[str, Attribute], version: str, schema: str, now_s: float
    ) -> Sent:
        """Post a batch, and wait for the answer. `now_s`: the time of day, for a date to retry after."""
        body = request_of(spans, resource, version, schema)
        if self._is_compressed:
            body = gzip.compress(body, COMPRESS_LEVEL)
        try:
            with self._client.stream("POST", self._url, content=body) as answer:
                text = b""
                for piece in answer.iter_bytes():
                    text += piece
                    if len(text) > ANSWER_BYTES_MAX:
                        break
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            return Sent(words_of(error) or type(error).__name__, may_repeat=True)
        status = answer.status_code
        if status // 100 == 2:
            return partial_success(text)
        wait_s = retry_after(answer.headers.get("retry-after", ""), now_s)
        return Sent(f"it answered {status}", status in RETRIED, wait_s)

    def close(self) -> None:
        self._client.close()


def partial_success(text: bytes) -> Sent:
    """Read a 2xx: a collector may have taken only some spans. Its words are not logged: they may quote a span."""
    try:
        found = json.loads(text)["partialSuccess"]
        rejected = max(0, int(found.get("rejectedSpans") or 0))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Sent()
    return Sent(rejected=rejected)


def retry_after(text: str, now_s: float) -> float:
    """Return the seconds of a Retry-After; 0 without a valid one."""
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - now_s)
    except (ValueError, TypeError, OverflowError):
        return 0.0
