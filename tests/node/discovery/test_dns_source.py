"""What a name of DNS is to a node: one backend for each address, for as long as its answer holds."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from random import Random

import pytest
import trio

from cluster.dns.dns_server import DnsFault, DnsFaultKind, ServiceRecord
from ranvier_py.config.config_loader import config_of
from ranvier_py.config.config_values import BackendSpec
from ranvier_py.config.source_targets import DnsTarget
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.routing.backends import BackendLimits, Registry
from ranvier_py.core.routing.wanted.source_set import SourceSet
from ranvier_py.io.sources import dns_lookups
from ranvier_py.node.discovery.backend_sources import BackendSources
from ranvier_py.node.discovery.dns_source import DnsSource
from ranvier_py.node.discovery.followers import Sink
from tests.node.discovery.source_labs import zone_lab

HEADLESS, SRV = "engines.lab", "_http._tcp.engines.lab"


class Looks:
    """One followed name, looked up when a test asks for it."""

    def __init__(self, text: str, server: tuple[str, int]) -> None:
        registry = Registry(BackendLimits())
        sources = BackendSources(
            registry,
            lambda url, weight, name, _, by: registry.add(url, weight=weight, name=name).id,
            lambda url, **_: registry.remove(url),
        )
        self.source = DnsSource(DnsTarget.parse(text), server, Random(0))
        self._sink = Sink(sources, self.source.name)
        self._reconciler = sources.reconciler

    async def look(self) -> float:
        with trio.fail_after(10):
            return await self.source.look(self._sink)

    @property
    def specs(self) -> list[BackendSpec]:
        return [each.spec for each in self.set.found.values()]

    @property
    def urls(self) -> list[str]:
        return [spec.url for spec in self.specs]

    @property
    def set(self) -> SourceSet[BackendSpec]:
        return self._reconciler.source(self.source.name, 0.0)

    @property
    def state(self) -> tuple[str, Sequence[str]]:
        return self.set.state.value, self.set.left_out


async def test_each_address_is_a_backend_until_the_answer_expires() -> None:
    async with zone_lab() as (zone, server, _):
        looks = Looks(f"{HEADLESS}:8000,weight=2,any_model=yes", server)
        zone.set(HEADLESS, ["10.0.0.2", "10.0.0.1", "fd00::1"])
        for ttl_s, pause_s in ((0, 1.0), (7, 7.0), (3600, 60.0)):
            zone.ttl_s = ttl_s
            assert await looks.look() == pause_s
        assert looks.urls == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
        assert {(spec.weight, spec.any_model) for spec in looks.specs} == {(2.0, True)}


@pytest.mark.parametrize("fault", [DnsFaultKind.NXDOMAIN, DnsFaultKind.EMPTY])
async def test_that_a_name_has_nothing_counts_with_the_third_answer_in_a_row(fault: DnsFaultKind) -> None:
    async with zone_lab() as (zone, server, _):
        looks = Looks(f"{HEADLESS}:8000", server)
        zone.set(HEADLESS, ["10.0.0.1"])
        for _round in range(2):
            zone.fault(HEADLESS, None)
            await looks.look()
            zone.fault(HEADLESS, DnsFault(fault))
            for _look in range(2):
                await looks.look()
                assert (looks.state[0], len(looks.urls)) == ("unsure", 1)
        await looks.look()
        assert (looks.state[0], looks.urls) == ("good", [])


async def test_servers_that_fail_or_are_silent_keep_what_was_found_and_are_asked_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dns_lookups, "LOOKUP_S", 0.2)
    async with zone_lab() as (zone, server, _):
        looks = Looks(f"{HEADLESS}:8000", server)
        zone.set(HEADLESS, ["10.0.0.1"])
        await looks.look()
        pauses = []
        for fault in (DnsFault(DnsFaultKind.SERVFAIL), DnsFault(DnsFaultKind.SLOW, delay_s=100)):
            zone.fault(HEADLESS, fault)
            pauses += [await looks.look(), await looks.look()]
            assert (looks.state[0], looks.urls) == ("failing", ["http://10.0.0.1:8000"])
        assert pauses == [1.0, 2.0, 4.0, 8.0]
        zone.fault(HEADLESS, DnsFault(DnsFaultKind.NXDOMAIN))
        for _look in range(5):
            await looks.look()
        assert looks.urls == ["http://10.0.0.1:8000"], "what is empty after a failure is not obeyed"


async def test_one_family_counts_the_one_that_is_written_or_the_first_that_there_is() -> None:
    async with zone_lab() as (zone, server, _):
        zone.set(HEADLESS, ["fd00::2", "fd00::1"])
        looks, six = Looks(f"{HEADLESS}:8000", server), Looks(f"{HEADLESS}:8000,family=6", server)
        await looks.look()
        zone.set(HEADLESS, ["fd00::1", "10.0.0.1"])
        await looks.look()
        await six.look()
        assert looks.urls == six.urls == ["http://[fd00::1]:8000"]
        fresh = Looks(f"{HEADLESS}:8000", server)
        await fresh.look()
        assert fresh.urls == ["http://10.0.0.1:8000"]


@pytest.mark.parametrize("shows_hosts", [True, False])
async def test_a_service_has_a_port_and_a_relative_weight_and_later_priorities_are_left_out(shows_hosts: bool) -> None:
    async with zone_lab() as (zone, server, _):
        zone.shows_hosts = shows_hosts
        zone.set("a.lab", ["10.0.0.1"])
        zone.set("b.lab", ["10.0.0.2"])
        zone.serve(
            SRV,
            [
                ServiceRecord("a.lab", 8000, priority=1, weight=10),
                ServiceRecord("b.lab", 8001, priority=1, weight=30),
                ServiceRecord("b.lab", 8002, priority=2, weight=30),
            ],
        )
        looks = Looks(f"{SRV},scheme=https,weight=2", server)
        await looks.look()
        found = [(spec.url, spec.weight, spec.tls_name) for spec in looks.specs]
        assert found == [("https://10.0.0.1:8000", 1.0, "a.lab"), ("https://10.0.0.2:8001", 3.0, "b.lab")]
        assert looks.state == ("good", ("1 services of a later priority than 1",))


async def test_a_service_whose_host_can_not_be_found_out_is_no_smaller_set() -> None:
    async with zone_lab() as (zone, server, _):
        zone.shows_hosts = False
        zone.set("a.lab", ["10.0.0.1"])
        zone.set("b.lab", ["10.0.0.2"])
        zone.serve(SRV, [ServiceRecord("a.lab", 8000), ServiceRecord("b.lab", 8000)])
        looks = Looks(SRV, server)
        await looks.look()
        zone.fault("b.lab", DnsFault(DnsFaultKind.SERVFAIL))
        await looks.look()
        assert (looks.state[0], len(looks.urls)) == ("failing", 2)


async def test_without_the_extra_the_source_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(f"{HEADLESS}:8000", ("127.0.0.1", 9))
    monkeypatch.setitem(sys.modules, "dns.asyncresolver", None)
    await looks.look()
    assert "ranvier-py[dns]" in looks.set.why


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("engines.lab", "NAME:PORT"),
        ("engines.lab:0", "port"),
        ("10.0.0.1:8000", "name"),
        ("engines.lab:8000,family=5", "family"),
        ("engines.lab:8000,weigth=2", "weigth is no option"),
        ("engines.lab:8000,api_key_file=/etc/passwd", "api_key_file: only the backends of a node's own configuration"),
        ("engines.lab:8000,weight=-2", "weight"),
        ("engines.lab:8000,weight=2,weight=3", "each once"),
        ("engines.lab:8000,scheme=ftp", "scheme"),
        ("engines.lab:8000,tls_name=a", "tls_name needs an https URL"),
        ("engines..lab:8000", "empty label"),
    ],
)
def test_what_is_no_target_is_refused_at_the_start(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(backend_dns=[text])
    assert problem in str(refused.value)
