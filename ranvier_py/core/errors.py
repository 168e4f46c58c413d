"""Every error this project raises on purpose, split by whose fault it is.

Rule: `status` is what the client gets if nothing was relayed yet. None of these changes the state of the core.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

EXHAUSTION = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ENOSPC, errno.EADDRNOTAVAIL))
"""This machine, or this process, has run out of descriptors, memory, places in an epoll set (ENOSPC) or ports."""


OF_LIBRARIES = re.compile(
    r"^\[Errno -?\d+\] (?:Error connecting to \([^)]*\): )?|^\[(?:SSL|X509)(?:: \w+)?\] ?| \(_ssl\.c:\d+\)$"
)
NO_PEM = "no certificate or key in PEM, or a damaged one"


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors that a group holds, however nested; or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, the errors it holds and those it came from, outermost first."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for inner in error.exceptions:
                yield from causes(inner)
        error = error.__cause__ or error.__context__


def words_of(error: BaseException) -> str:
    """Return the innermost message, because libraries wrap an error in others that explain less or nothing, without
    what only their authors read: numbers of errors, and lines of OpenSSL's sources."""
    found = [str(each) for each in causes(error) if not isinstance(each, BaseExceptionGroup) and str(each)]
    if not found:
        return type(error).__name__
    return OF_LIBRARIES.sub("", found[-1]).replace("PEM lib", NO_PEM) or found[-1]


def is_exhaustion(error: BaseException) -> bool:
    """Whether a connection failed only because this machine or process ran out of something (EXHAUSTION)."""
    numbers = [each.errno for each in causes(error) if isinstance(each, OSError) and each.errno is not None]
    return bool(numbers) and EXHAUSTION.issuperset(numbers)


class RanvierError(Exception):
    """Root of the tree. `code` is the machine-readable word in the error body and in the metrics."""

    status: int = 500
    code: str = "internal_error"
    kind: str = "api_error"
    param: str | None = None  # the member of the request that is wrong

    def __str__(self) -> str:
        """Return the message, fit for any answer or log: what it quotes of a client may not be valid Unicode."""
        return super().__str__().encode("utf-8", "replace").decode()


class ConfigError(RanvierError):
    """The operator's: the configuration can't work. `problems` has one line for each wrong key, all at once."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class ListenError(RanvierError, OSError):
    """The operator's, or this machine's: an address can't be listened on: it is in use, not of this machine, or a name
    that has no address."""


@contextmanager
def listening_on(address: str) -> Iterator[None]:
    """Turn any OSError from looking up or binding inside the block into a ListenError that names the address."""
    try:
        yield
    except OSError as error:
        refused = ListenError(f"{error.strerror or error} ({address})")
        refused.errno = error.errno
        raise refused from error


class RequestError(RanvierError):
    """The client's: refused before any backend was asked."""

    kind = "invalid_request_error"


class BadRequest(RequestError):
    status, code = 400, "bad_request"


class Conflict(BadRequest):
    """What is asked for would meet something that is there already."""

    status, code = 409, "conflict"


class Unauthorized(RequestError):
    status, code = 401, "unauthorized"


class InvalidKey(Unauthorized):
    """A client shows no key, or none that is valid."""

    code = "invalid_api_key"


class Forbidden(RequestError):
    status, code = 403, "forbidden"


class NotFound(RequestError):
    status, code = 404, "not_found"


class ModelNotFound(NotFound):
    """No backend serves the model that a request names."""

    code, param = "model_not_found", "model"


class ResponseLost(NotFound):
    """No engine keeps the response that a request names, or nobody knows which."""

    code, param = "previous_response_not_found", "previous_response_id"


class MethodNotAllowed(RequestError):
    status, code = 405, "method_not_allowed"


class LimitReached(RequestError):
    """A limit of the client's key or tenant. `fields`: of the answer."""

    status, code, kind = 429, "rate_limit_exceeded", "rate_limit_error"

    def __init__(self, words: str, fields: Sequence[tuple[bytes, bytes]] = ()) -> None:
        super().__init__(words)
        self.fields = fields


class BudgetSpent(LimitReached):
    """To be tried again only when the budget's next window begins."""

    code = kind = "insufficient_quota"


class LargerThanLimit(BadRequest):
    """It would never fit, however long the client waited."""

    code = "request_larger_than_limit"


class RequestTimeout(RequestError):
    status, code = 408, "request_timeout"


class BodyTooLarge(RequestError):
    status, code = 413, "body_too_large"


class ExpectationFailed(RequestError):
    status, code = 417, "expectation_failed"


class UpgradeRefused(RequestError):
    """A WebSocket is asked for where there is none."""

    status, code = 426, "upgrade_refused"


class HeaderTooLarge(RequestError):
    status, code = 431, "header_too_large"


class LoopDetected(RequestError):
    """The request is one that this node has sent."""

    status, code = 508, "loop_detected"


class Unavailable(RanvierError):
    """Ours: no backend can be asked just now. `retry_after_s` becomes the Retry-After header."""

    status, code, kind = 503, "unavailable", "server_error"
    retry_after_s: int = 1


class NoBackend(Unavailable):
    code = "no_backend"


class NodeBusy(Unavailable):
    code = "node_busy"


class NodeCut(NodeBusy):
    """The time of a node's drain was over, or was cut short, while it answered."""

    code = "cut"


class NodeExhausted(Unavailable):
    """This node had no descriptor, port or memory left to connect to a backend, so the backend is not to blame."""

    code = "node_exhausted"


class UpstreamError(RanvierError):
    """The backend's: it did not answer properly. Another one may be tried only while nothing was relayed."""

    status, code, kind = 502, "upstream_error", "server_error"


class ConnectFailed(UpstreamError):
    code = "connect_failed"


class UpstreamClosed(UpstreamError):
    """The backend closed the connection before its answer was complete."""

    code = "upstream_closed"


class UpstreamGarbled(UpstreamError):
    """The backend's answer is not HTTP/1.1."""

    code = "upstream_garbled"


class UpstreamEmpty(UpstreamError):
    """The backend ended an answer of status 200 without any output, and without an error that says why."""

    code = "upstream_empty"


class UpstreamTimeout(UpstreamError):
    status, code = 504, "upstream_timeout"


class UpstreamHangs(UpstreamTimeout):
    """The backend hangs, and the request is to be placed again, on the backend with the id `target`."""

    def __init__(self, words: str, target: int = -1) -> None:
        super().__init__(words)
        self.target = target


class TokenizerLost(RanvierError):
    """Ours: the tokenizer process ended, or was ended, before it answered, or there is none just now. It costs
    matches."""

    code = "tokenizer_lost"


class AddressError(RanvierError, OSError):
    """Nobody's: a name has no address, or no resolver answered in time."""

    status, code = 502, "no_address"


class TemplateRefused(RanvierError):
    """Nobody's: the chat template refuses these messages, or there is none. The chat is placed without tokens, and the
    engine decides: never a 4xx of ours."""

    status, code = 422, "template_refused"


class ClientGone(RanvierError):
    """Nobody's: the client closed its connection."""

    status, code = 499, "client_gone"


class ClientTooSlow(ClientGone):
    """The client reads its answer so slowly that it only occupies a place."""

    code = "client_too_slow"


class NoZmq(RanvierError):
    """pyzmq is not installed."""

    code = "no_zmq"

    def __init__(self, words: str = "KV events need pyzmq: install ranvier-py[zmq]") -> None:
        super().__init__(words)
