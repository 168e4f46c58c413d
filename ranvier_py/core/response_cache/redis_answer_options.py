"""Options and counters of the response cache in Redis."""

from __future__ import annotations

from dataclasses import dataclass

from ranvier_py.core.metrics import counter, gauge
from ranvier_py.core.options import Options, option, seconds
from ranvier_py.core.redis_commands import prefix_problems


@dataclass(frozen=True, slots=True)
class RedisAnswerOptions(Options):
    """The response cache in Redis. A command may take `timeout_s`, and opening a connection `connect_s` before that."""

    SECTION = "Responses"
    PREFIX = "response_cache_redis_"

    key_prefix: str = option(
        "ranvier:resp:", "Begins every key in Redis; all nodes need the same.", key="response_cache_redis_prefix"
    )
    connections_max: int = option(8, "Most connections of the response cache to Redis.", least=1, most=256)
    timeout_s: float = seconds(1.0, "A command to Redis that takes longer means that it is away.")
    connect_s: float = seconds(
        3.0, "Longest wait for a connection to Redis.", key="response_cache_redis_connect_timeout_s"
    )
    bytes_max: int = option(
        4 * 2**20, "Largest answer that is sent to Redis, as it came.", least=1024, most=256 * 2**20
    )
    retry_s: float = seconds(30.0, "Redis that is away is asked again after this.")
    fallback: bool = option(
        True,
        "Keep answers in memory while Redis is away; without, nothing is cached then.",
        key="response_cache_fallback_to_memory",
    )
    fallback_capacity: int = option(
        1000, "Answers that are kept in memory while Redis is away.", least=1, key="response_cache_fallback_capacity"
    )
    fallback_ttl_s: float = seconds(
        300.0, "How long answers are kept in memory while Redis is away.", key="response_cache_fallback_ttl_s"
    )

    def contradictions(self) -> list[str]:
        return prefix_problems("key_prefix", self.key_prefix)


@dataclass(slots=True)
class RedisAnswerCounters:
    found: int = counter("Stored answers that were found in Redis.")
    written: int = counter("Answers of engines written to Redis.")
    too_large: int = counter("Answers not written to Redis because they are too large.")
    dropped: int = counter("Answers not written because the queue for Redis was full.")
    unasked: int = counter("Look-ups of answers in Redis left out: too many at once, or no generation known.")
    refused: int = counter("Answers that Redis had no room for.")
    garbage: int = counter("Stored answers in Redis that could not be read, or were void.")
    generations: int = counter("Times that this node voided all answers in Redis by a new generation.")
    outages: int = counter("Times that the Redis of the response cache went away.")
    fallback_hits: int = counter("Answers found in memory while Redis was away.")
    waiting: int = gauge("Answers that wait to be written to Redis.")
