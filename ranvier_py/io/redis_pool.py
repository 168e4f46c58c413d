"""Connections to one Redis or Valkey, shared by all parts of a node that use it.

The client of redis-py blocks, so it runs in threads, one for each connection in use. Rule: all commands of a call go
out as one pipeline. A call that exceeds its deadline has failed; the event loop then closes its connection, which ends
the thread. After any failure the connection is not used again, and nothing is sent again. The address may contain a
password: it is shown without, and errors are named by kind.
Bounds: `size` connections and threads; a call that finds all in use waits for one within its own deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import trio

from ranvier_py.core.addresses import checked_host, without_secrets
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.redis_commands import Command, RedisFailure, RedisRefusal

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry
except ImportError:  # the extra is not installed
    redis = None  # type: ignore[assignment]


class Borrowed:
    """A connection that one thread uses now."""

    __slots__ = ("client", "is_over")

    def __init__(self) -> None:
        self.client: Any = None
        self.is_over = False  # nobody waits for its replies any more


class RedisPool:
    """Raises ConfigError if redis-py is missing or the URL is invalid; the message has `key` but not the URL."""

    def __init__(self, url: str, key: str, *, size: int, timeout_s: float, connect_s: float) -> None:
        if redis is None:
            raise ConfigError([f"{key}: Redis needs ranvier-py[redis]"])
        self._url, self._key = url, key
        self._timeout_s, self._connect_s = timeout_s, connect_s
        self._idle = [self._made()]  # an invalid address raises now
        self._limiter = trio.CapacityLimiter(size)  # of threads, including those that nobody waits for any more
        self.place = without_secrets(url)

    @property
    def active(self) -> int:
        """Connections in use. A thread that has just returned its connection is not counted any more."""
        return int(min(self._limiter.borrowed_tokens, self._limiter.total_tokens - len(self._idle)))

    @property
    def idle(self) -> int:
        return len(self._idle)

    async def send(self, commands: Sequence[Command], *, connects: bool = False) -> list[object] | RedisFailure:
        """Send commands as RedisCommands defines it."""
        deadline_s = self._timeout_s + (self._connect_s if connects else 0.0)
        borrowed = Borrowed()
        try:
            with trio.fail_after(deadline_s):
                return await trio.to_thread.run_sync(
                    self._exchange, borrowed, commands, abandon_on_cancel=True, limiter=self._limiter
                )
        except (trio.TooSlowError, redis.TimeoutError):
            failure = RedisFailure("timeout", f"no answer within {deadline_s:g} s")
        except (redis.ConnectionError, OSError) as error:
            failure = RedisFailure("connection", reason_of(error))
        except Exception as error:  # a server that is no Redis may have redis-py raise anything
            failure = RedisFailure("other", reason_of(error))
        finally:
            borrowed.is_over = True
            if borrowed.client is not None:
                cut(borrowed.client)
        self.close_idle()  # they lead to the same server, so they are suspect, too
        return failure

    def close_idle(self) -> None:
        while self._idle:
            cut(self._idle.pop())

    def _exchange(self, borrowed: Borrowed, commands: Sequence[Command]) -> list[object]:
        """Exchange commands for replies, in a thread. Raises what redis-py does."""
        try:
            client = self._idle.pop()  # the one used last
        except IndexError:
            client = self._made()
        borrowed.client = client
        pipeline = client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        replies = [refusal_of(reply) for reply in pipeline.execute(raise_on_error=False)]
        if borrowed.is_over:
            cut(client)
        else:
            borrowed.client = None
            self._idle.append(client)
        return replies

    def _made(self) -> Any:
        """Make a client whose connection is opened at its first use. Raises ConfigError."""
        try:
            place = urlsplit(self._url)
            if place.scheme != "unix":
                checked_host(place.hostname or "localhost")
            return redis.Redis.from_url(
                self._url,
                socket_connect_timeout=self._connect_s,
                socket_timeout=self._timeout_s,
                protocol=2,
                retry=Retry(NoBackoff(), 0),
                health_check_interval=0,
            )
        except (ValueError, TypeError) as error:
            raise ConfigError(
                [f"{self._key}: must be like redis://:PASSWORD@HOST:6379, rediss:// or unix:///SOCKET"]
            ) from error


def cut(client: Any) -> None:
    """Close the client's connection, even if a thread waits for it."""
    client.connection_pool.disconnect()


def refusal_of(reply: object) -> object:
    """Return a reply as it is, or a RedisRefusal for an error, without Redis's own text, which may repeat a secret."""
    if not isinstance(reply, Exception):
        return reply
    if isinstance(reply, redis.exceptions.OutOfMemoryError):
        return RedisRefusal("OOM")
    if isinstance(reply, redis.ReadOnlyError):
        return RedisRefusal("READONLY")
    return RedisRefusal("WRONGTYPE" if "WRONGTYPE" in str(reply) else type(reply).__name__)


def reason_of(error: Exception) -> str:
    """Describe an error by kind and by the system's reason, if any; never by Redis's text, which may have a secret."""
    cause = error.__cause__ or error.__context__
    reason = next((each.strerror for each in (error, cause) if isinstance(each, OSError) and each.strerror), "")
    return f"{type(error).__name__}{f': {reason}' if reason else ''}"
