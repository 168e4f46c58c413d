"""The reporter at work: a book that follows the engine, and one conversation with each router.

Every 100 ms the calls that came are taken into the book, and each router is told what changed. Routers are
independent: one that is slow or gone holds up nobody else. For fingerprints the way of naming prefixes is asked of the
routers; those of one cluster agree, and one that names them otherwise is left out until it does not, and said so. When
a router was restarted with another key, it says 422, is asked again, and all blocks that are held are hashed anew.

Rules: one trio thread, hence no lock; nothing is ever raised for what a router says.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from random import Random
from typing import Any

import trio

from ranvier_py.core.engine_cache.sources.push_book import BlockScheme, BlockSource, Book
from ranvier_py.core.engine_cache.sources.push_keys import PREFIX_TOKENS
from ranvier_py.core.engine_cache.sources.push_messages import PREFIX_HASH
from ranvier_py.core.engine_cache.sources.push_sender import OK_STATUS, Sender, SenderSettings, Speaker
from ranvier_py.core.routing.request_record import scheme_mark
from ranvier_py.reporter.intake import Intake
from ranvier_py.reporter.routers import NO_ANSWER, RouterLink

log = logging.getLogger(__name__)

SCHEME_RETRY_S = 1.0  # between two questions for the scheme
IDLE_S = 0.02  # how late a message may leave
LAST_WORDS_S = 1.0  # for what is still to be said when it ends
KEY_BYTES = 32


class Hashes(Enum):
    """What an engine's hashes are, and what routers are told."""

    GIVEN = "given"  # prefix hashes of the Purdue report, as they are
    PREFIX_HASH = "prefix_hash"  # names of blocks, told as such prefix hashes
    FINGERPRINT = "fingerprint"  # names of blocks, told as the routers' own fingerprints


@dataclass(frozen=True, slots=True)
class ReportingSettings:
    sender: SenderSettings = field(default_factory=SenderSettings)
    prefix_tokens: int = PREFIX_TOKENS
    block_tokens: int = 16  # of prefix hashes; fingerprints take the routers'
    plain: bool = False  # speak the report's own form: evictions, and all hashes every 5 s
    tells_again: bool = False  # the engine may tell of blocks that a request reuses as if it stored them
    cluster_secret: bytes = b""  # makes the key of the fingerprints where routers may not send it


class _Router:
    """One router: the connection, what is said, how it names prefixes."""

    __slots__ = ("link", "mark", "sender", "told_why")

    def __init__(self, link: RouterLink, sender: Sender) -> None:
        self.link = link
        self.sender = sender
        self.mark = ""
        self.told_why = ""


class Reporting:
    """Runs until `stopping` is set. `worker` is the name or the URL of the routers' backend."""

    def __init__(
        self,
        worker: str,
        routers: Sequence[str],
        intake: Intake,
        key: str,
        hashes: Hashes,
        model: str,
        settings: ReportingSettings,
    ) -> None:
        """Raises ValueError."""
        if not worker or not routers:
            raise ValueError("a reporter needs a worker_id and at least one router")
        if hashes is Hashes.FINGERPRINT and (not model or settings.plain):
            raise ValueError("fingerprints need the name of the model, and have no plain form")
        self.stopping = False
        self.certain: Callable[[], bool] = lambda: True  # nothing of the engine was missed
        self.book = Book()
        self.source: BlockSource | None = None
        self._intake = intake
        self._hashes = hashes
        self._model = model
        self._settings = settings
        self._primary: _Router | None = None  # whose way of naming prefixes is ours
        if hashes is Hashes.PREFIX_HASH:
            scheme = BlockScheme(model, settings.prefix_tokens, block_tokens=settings.block_tokens)
            self.source = BlockSource(self.book, scheme, tells_again=settings.tells_again)
        speaker = Speaker(worker, "" if settings.plain else secrets.token_hex(8), model)
        rng = Random(secrets.randbits(64))  # noqa: S311  # only for pauses
        self._routers = [
            _Router(RouterLink(url, key), Sender(speaker, PREFIX_HASH, self.book, rng, settings.sender))
            for url in dict.fromkeys(routers)
        ]

    @property
    def senders(self) -> Sequence[Sender]:
        return [router.sender for router in self._routers]

    async def run(self) -> None:
        """Until `stopping`."""
        async with trio.open_nursery() as nursery:
            for router in self._routers:
                nursery.start_soon(self._talk, router)
            look_at = 0.0
            while not self.stopping:
                now = time.monotonic()
                if now >= look_at:
                    look_at = now + self._settings.sender.sync_s
                    self._intake.look(self.book)
                self._follow()
                await trio.sleep(self._settings.sender.batch_s / 2)
            self._follow()
            for _ in range(round(LAST_WORDS_S / IDLE_S)):
                if all(router.sender.idle for router in self._routers):
                    break
                await trio.sleep(IDLE_S)
            nursery.cancel_scope.cancel()

    def _follow(self) -> None:
        """Take in what the engine did, and let every router know."""
        if self._hashes is Hashes.FINGERPRINT and self.source is None:
            return  # it waits until we know how to name it
        self._intake.take(self.book, self.source)
        changed, certain = self.book.take_changed(), self.certain() and not self._lacks()
        for router in self._routers:
            router.sender.certain = certain
            router.sender.note(changed)

    def _lacks(self) -> bool:
        """Whether the engine may hold what has no fingerprint here; prefix hashes leave most of it out anyway."""
        return self._hashes is Hashes.FINGERPRINT and self.source is not None and self.source.lacks

    # --- one router -------------------------------------------------------------------------------------------------

    async def _talk(self, router: _Router) -> None:
        async with router.link:
            while True:
                if self._is_strange(router) and not await self._agree(router):
                    await trio.sleep(SCHEME_RETRY_S)
                    continue
                posting = router.sender.next(time.monotonic())
                if posting is None:
                    await trio.sleep(IDLE_S)
                    continue
                status, reply = await router.link.post(posting)
                if status == NO_ANSWER:
                    router.sender.failed(time.monotonic())
                else:
                    router.sender.answered(status, reply, time.monotonic())
                if self._hashes is not Hashes.FINGERPRINT and router.sender.misnamed:
                    router.sender.misnamed = False  # asked again, for it may be another router by then
                why = "" if status == OK_STATUS else router.link.why
                if router.sender.old_in_a_row > 1:  # once is a lost answer
                    why = "it hears another reporter for this worker"
                self._note(router, why)

    def _is_strange(self, router: _Router) -> bool:
        """Whether it has to say first how it names prefixes."""
        return self._hashes is Hashes.FINGERPRINT and (not router.mark or router.sender.misnamed)

    async def _agree(self, router: _Router) -> bool:
        """Learn how a router names prefixes. False: not known, or not as we do."""
        told = await router.link.scheme()
        if told is None:
            self._note(router, router.link.why)
            return False
        scheme, why = self._scheme_in(told)
        if scheme is None:
            self._note(router, why)
            return False
        if self.source is None or (router is self._primary and scheme != self.source.scheme):
            self._adopt(router, scheme)
        assert self.source is not None
        if scheme != self.source.scheme:
            self._note(router, "it names prefixes otherwise than the first router: have they the same cluster secret?")
            return False
        router.mark = scheme.mark
        router.sender.renamed(scheme.name)
        return True

    def _adopt(self, router: _Router, scheme: BlockScheme) -> None:
        self._primary = router
        log.info("reporter.scheme %s of %s", scheme.mark, router.link.url)
        if self.source is None:
            self.source = BlockSource(self.book, scheme, tells_again=self._settings.tells_again)
        else:
            self.source.use(scheme)
            while not self.source.settle():
                pass
            self.book.take_changed()  # all of it: the comparison that follows says so
        for other in self._routers:
            other.sender.misnamed = other.sender.scheme != scheme.name

    def _scheme_in(self, told: Mapping[str, Any]) -> tuple[BlockScheme | None, str]:
        """What a router told; None, and why, where that does not suffice."""
        identity, mark, block_tokens = told.get("identity"), told.get("mark"), told.get("block_tokens")
        if not isinstance(identity, str) or not isinstance(mark, str) or type(block_tokens) is not int:
            return None, "it does not say how it names prefixes"
        key = told.get("key")
        secret = self._settings.cluster_secret
        if secret:
            made = blake2b(secret, digest_size=KEY_BYTES, person=b"fingerprint").digest()  # as node.scheme_of does
        elif isinstance(key, str):
            made = bytes.fromhex(key)
        else:
            instead = "--cluster-secret-file makes it here, --hashes prefix_hash does without"
            return None, f"it withholds the key of its fingerprints: {told.get('withheld', '')}; {instead}"
        if scheme_mark(identity, made) != mark:
            return None, "the key is not the one that it names prefixes with"
        return BlockScheme(self._model, 0, made, identity, mark, block_tokens), ""

    def _note(self, router: _Router, why: str) -> None:
        """Say it once."""
        if why != router.told_why:
            router.told_why = why
            log.log(
                logging.WARNING if why else logging.INFO, "reporter.router %s %s", router.link.url, why or "hears us"
            )
