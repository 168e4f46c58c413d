"""Asks each engine of the configuration what a node will ask it: is it alive, does it take our key, what does it serve,
does it generate one token, does it tokenize as we do, do its clock and its certificate agree with ours?

Rule: of one engine the first thing that prevents the others is named alone. A hosted provider is asked for its models
only, since a token costs money. Bounds: AT_ONCE engines, and the time limit of probes for each question.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import orjson
import trio

from ranvier_py.config.config_model import Config
from ranvier_py.config.config_values import BackendSpec
from ranvier_py.config.model_tables import table_of
from ranvier_py.core.engine_cache.sources.engine_polls import MISSING_STATUSES, is_alive, read_models
from ranvier_py.core.errors import ConfigError, words_of
from ranvier_py.core.findings import Finding, Severity
from ranvier_py.core.routing.engine_findings import unserved
from ranvier_py.core.routing.models.served_apis import lacked_by_cards
from ranvier_py.core.routing.request_paths import CHAT_PATH
from ranvier_py.core.tokenize.tokenizer_probe import (
    ProbeTokens,
    misfit,
)
from ranvier_py.io.engine_asker import EngineAsker, EngineReply
from ranvier_py.io.tokenizer import ChatTokenizer
from ranvier_py.node.checks.source_checks import backends_of
from ranvier_py.node.checks.tokenizer_fit import misfit_finding, tokens_of
from ranvier_py.node.parts.tls_parts import ending, engine_context_of

AT_ONCE = 16
TOKEN_LIMIT_S = 20.0  # for one token, behind a full batch
CLOCKS_S = 5.0  # budgets and revocations end by the time of day; less does not matter to them
REFUSES_KEY = (401, 403)
HELLO = [{"role": "user", "content": "Hello"}]


class EngineCheck:
    """The look at one engine; `found` is what is wrong, `models` what it lists."""

    def __init__(self, config: Config, spec: BackendSpec, asker: EngineAsker, ours: ProbeTokens) -> None:
        self.found: list[Finding] = []
        self.models: Sequence[str] = ()
        self._config, self.spec, self._ours = config, spec, ours
        self._asker, self._url = asker, spec.place
        self._about = spec.label

    async def run(self) -> None:
        parts = urlsplit(self._url)
        try:
            await trio.socket.getaddrinfo(parts.hostname, parts.port or 80)
        except OSError as error:
            remedy = "Correct the name, or what resolves names on this machine."
            self._add(
                "name", Severity.DOWN, f"has a name that does not resolve, {parts.hostname}: {words_of(error)}", remedy
            )
            return
        if not await self._answers():
            return
        cards = await self._lists_models()
        if cards is None or self.spec.hosted or not self.models:
            return
        lacks = lacked_by_cards(tuple(cards))
        if lacks is None or CHAT_PATH not in lacks:
            await self._generates(self.models[0])
        await self._tokenizes(self.models[0], cards[0])

    async def _ask(self, path: str, sent: bytes | None = None, timeout_s: float | None = None) -> EngineReply:
        return await self._asker.ask(self._url, path, sent, tls_name=self.spec.tls_name, timeout_s=timeout_s)

    def _add(self, kind: str, severity: Severity, what: str, remedy: str, whom: str = "", command: str = "") -> None:
        words = f"engine {self._about} {what}"
        self.found.append(Finding(kind, severity, words, about=self._about, whom=whom, remedy=remedy, command=command))

    async def _answers(self) -> bool:
        reply = await self._ask("/health")
        if reply.page.status in MISSING_STATUSES:
            reply = await self._ask("/v1/models")
        if reply.why:
            self._add("engine_down", Severity.DOWN, f"does not answer: {reply.why}", "Start it, or correct its URL.")
            return False
        if not is_alive(reply.page) and reply.page.status not in REFUSES_KEY:
            self._add("engine_down", Severity.DOWN, f"answers {reply.page.status} to /health", "See what its log has.")
            return False
        if difference := clock_difference(reply.date, time.time()):
            what = f"has a clock that differs from this machine's by {difference:.0f} s"
            self._add("clocks", Severity.DEGRADED, what, "Have both set by NTP.", "budgets, revocations", "timedatectl")
        await self._certificate()
        return True

    async def _certificate(self) -> None:
        """Look when the certificate of an https engine ends; whether it is good was seen when it answered."""
        parts = urlsplit(self._url)
        if parts.scheme != "https":
            return
        context = engine_context_of(self._config) or ssl.create_default_context()
        with suppress(OSError, trio.BrokenResourceError), trio.move_on_after(TOKEN_LIMIT_S):
            name = self.spec.tls_name or parts.hostname
            plain = await trio.open_tcp_stream(parts.hostname or "", parts.port or 443)
            async with trio.SSLStream(plain, context, server_hostname=name) as stream:
                await stream.do_handshake()
                shown: Mapping[str, Any] = stream.getpeercert() or {}
                ends = [ssl.cert_time_to_seconds(shown["notAfter"])] if "notAfter" in shown else []
                self.found += ending(self._about, ends, time.time())

    async def _lists_models(self) -> Sequence[Mapping[str, Any]] | None:
        reply = await self._ask("/v1/models")
        if reply.page.status in REFUSES_KEY:
            self._refused(reply)
            return None
        names, cards = read_models(reply.page)
        if names is None:
            what = f"lists no models: {reply.why or f'status {reply.page.status}'}"
            self._add("model", Severity.DEGRADED, what, "See whether this is an engine, and its base URL right.")
            return None
        self.models = names
        return cards

    def _refused(self, reply: EngineReply) -> None:
        given = "refuses this node's key" if key_for(self._config, self.spec) else "wants a key, and this node has none"
        remedy = "Set backend_api_key_file, or its own api_key_file, to the key that the engine was started with."
        self._add("engine_key_refused", Severity.DOWN, f"{given}: status {reply.page.status}", remedy)

    async def _generates(self, model: str) -> None:
        body = {"model": model, "messages": HELLO, "max_tokens": 1}
        reply = await self._ask(CHAT_PATH.decode(), orjson.dumps(body), TOKEN_LIMIT_S)
        status = reply.page.status
        if status in REFUSES_KEY:
            self._refused(reply)
        elif status in (429, 503):
            self._add("engine_busy", Severity.NOTICE, f"is too busy for one token: status {status}", "Try again later.")
        elif status != 200:
            why = reply.why or f"status {status}, {words_in(reply.page.body)}"
            remedy = "See what its log has; without a chat template it answers no chats."
            self._add("engine_fails", Severity.DEGRADED, f"gives no token of {model}: {why}", remedy)

    async def _tokenizes(self, model: str, card: Mapping[str, Any]) -> None:
        theirs = await tokens_of(self._ask, model)
        differs = misfit(self._ours, theirs)
        if differs:
            self.found.append(misfit_finding(self._about, differs, card, self._config.tokenizer))
        elif not theirs.text and self._config.tokenizer in ("", "embedded"):
            self.found.append(misfit_finding(self._about, "", card, self._config.tokenizer))


def key_for(config: Config, spec: BackendSpec) -> str:
    return spec.key.content if spec.key is not None else config.api_key


def clock_difference(date: str, now: float) -> float:
    """Return by how many seconds a Date field and our time differ, 0 if that does not matter or is not known."""
    with suppress(ValueError, TypeError):
        difference = abs(parsedate_to_datetime(date).timestamp() - now)
        return difference if difference > CLOCKS_S else 0.0
    return 0.0


def words_in(body: bytes) -> str:
    """Return the message of an engine's error."""
    with suppress(orjson.JSONDecodeError, AttributeError):
        found = orjson.loads(body)
        error = found.get("error", found)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:200]
    return repr(body[:80])


async def check_engines(config: Config) -> list[Finding]:
    specs, found = await backends_of(config)
    if not specs and not found:
        remedy = "Name one by --backend URL, or add it while the node runs."
        return [Finding("no_engine", Severity.NOTICE, "no engine is configured", whom="all clients", remedy=remedy)]
    try:
        template = str(config.chat_template) if config.chat_template else None
        tokenizer = await trio.to_thread.run_sync(lambda: ChatTokenizer.load(config.tokenizer, chat_template=template))
        ours = tokenizer.facts.probe
    except ConfigError:  # a problem of the configuration
        ours = ProbeTokens()
    context, keys = engine_context_of(config), [key_for(config, spec) for spec in specs]
    askers = {key: EngineAsker(key, context, config.polls.probe_timeout_s) for key in keys}
    checks = [EngineCheck(config, spec, askers[key], ours) for spec, key in zip(specs, keys, strict=True)]
    limiter = trio.CapacityLimiter(AT_ONCE)

    async def run(check: EngineCheck) -> None:
        async with limiter:
            await check.run()

    async with trio.open_nursery() as nursery:
        for check in checks:
            nursery.start_soon(run, check)
    return [*found, *(each for check in checks for each in check.found), *unserved(unlisted(config, checks))]


def unlisted(config: Config, checks: Sequence[EngineCheck]) -> Mapping[str, Sequence[str]]:
    """Return the tables of models that lead to what no engine lists, if all of them have answered."""
    table, listed = table_of(config.model), {model for check in checks for model in check.models}
    if table is None or not all(check.models for check in checks) or any(check.spec.any_model for check in checks):
        return {}
    return table.unknown(lambda model: model not in listed)
