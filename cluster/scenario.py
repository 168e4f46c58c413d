"""Reads scenarios: what happens to a cluster, when, and what must hold afterwards. Simulator and processes share them.

    about = "One sentence."
    for_s = 40.0                     # how long it runs, from the moment the first nodes start
    runs_on = ["sim", "processes"]   # default: both. A harness must refuse, never skip, what it cannot do.
    [cluster]                        # its nodes and engines, see `Cluster`
    [load]                           # multi-turn chats from clients outside, see `Load`; without it no traffic
    [[step]]                         # in order of at_s: at_s, do, and the keys of that verb, see `VERBS` and `Step`
    [expect]                         # bounds, see `Expect`; a bound that is left out is not checked

Nodes and engines are numbered from 0. A *selector* is a list of numbers or one of "all", "none", "one", "half", "30%",
and for `others` "rest" (all that `nodes` does not name). `settle` turns selectors into numbers by a seeded draw, so the
same seed picks the same victims on both harnesses. A step with `for_s` is undone after that time; with `every_s` it
takes its nodes one after the other. Reading is strict: an unknown key or verb or a wrong type raises a ScenarioError
that names the place. Pure: nothing here knows which harness runs a scenario.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from cluster.load.workload import UNSTREAMED_SHARE
from cluster.network.links import PERFECT, PLANES, Link, Rule

SCENARIOS = Path(__file__).with_name("scenarios")
Harness: TypeAlias = Literal["sim", "processes"]
HARNESSES: tuple[Harness, ...] = get_args(Harness)
SECONDS_MAX = 7 * 86_400.0
"""A week: longer than the protocol remembers anything."""

Seconds: TypeAlias = Annotated[float, Field(ge=0, le=SECONDS_MAX)]
"""The type of all numbers of a scenario that are no counts or shares: from 0 to SECONDS_MAX."""

Count: TypeAlias = Annotated[int, Field(ge=0)]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Selector: TypeAlias = tuple[Count, ...] | str
WORDS = ("all", "none", "one", "half", "rest")
Dns: TypeAlias = Literal["all", "subset", "empty", "self", "stale", "foreign", "failing", "slow", "flapping"]
"""What the cluster's name resolves to: all running nodes; a third of them, another each time; nothing; the asking node
alone; the nodes of the beginning; another cluster's addresses; SERVFAIL; `all` after 5 s; one of these, varying."""


STRICT = with_config(ConfigDict(extra="forbid"))


class ScenarioError(ValueError):
    """The file is not a scenario. The message names file and place."""


@STRICT
@dataclass(frozen=True, slots=True)
class Cluster:
    """The nodes and engines of a scenario, and how they are set up."""

    nodes: Count = 5
    engines: Count = 3
    running: Selector = "all"  # nodes that start at 0 s; the others wait for a `start` step
    spread_s: Seconds = 0.0  # over which the starts at 0 s are spread evenly
    formed: bool = False  # whether nodes that start at 0 s know each other already; in the simulator only
    dns: Dns = "all"  # what the cluster's name resolves to at first
    profile: Literal["lan", "wan"] = "lan"  # of membership
    names: tuple[str, ...] = ()  # of the nodes, where they matter (two alike); default n0, n1, …
    budget_bytes_per_s: Count = 0  # of one node for gossip; 0 = the default of the node
    route_ttl_s: Seconds = 0.0  # 0 = the default of the node
    log_entries: Count = 0  # route updates that an origin keeps for repair; 0 = the default of the node
    events: bool = False  # engines publish KV events, chats have tokens
    cache_blocks: Count = 4000  # of 16 tokens, of each engine that publishes events
    replay_messages: Count = 10_000  # the number of its last messages that such an engine can send again
    ranked: Selector = "none"  # engines with two data-parallel ranks behind their port; processes only
    max_running: Count = 0  # requests that an engine works at, others wait there; 0 = its default; processes only


@STRICT
@dataclass(frozen=True, slots=True)
class Load:
    """Chats: each turn goes to any node, and follows the last answer after `think_s` (mean)."""

    chats_per_s: Seconds = 2.0
    turns: Count = 4
    think_s: Seconds = 1.0
    prefixes: Count = 4  # distinct system prompts that chats begin with
    unstreamed: Share = UNSTREAMED_SHARE  # of the turns, those that ask for a whole answer; processes only


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that happens. `VERBS` lists the fields that each verb takes; other fields keep their defaults."""

    at_s: Seconds
    do: str
    nodes: Selector = "none"
    others: Selector = "rest"
    engines: Selector = "none"
    for_s: Seconds = 0.0  # 0 = until something else ends it
    every_s: Seconds = 0.0  # between one node of the step and the next
    one_direction: bool = False  # only from `nodes` to `others`
    keep_state: bool = True  # whether the small state file survives
    down_s: Seconds = 1.0  # between kill and start of a restart
    loss: Share = 0.0  # share of datagrams that are lost; streams are delayed instead
    delay_s: Seconds = 0.0  # added to each packet, one way
    jitter_s: Seconds = 0.0  # mean of an exponential part added to `delay_s`
    duplicate: Share = 0.0
    reorder: Share = 0.0  # share of datagrams held back for `reorder_s`
    reorder_s: Seconds = 0.05
    corrupt: Share = 0.0  # share of datagrams with a flipped bit
    mtu: Count = 0  # larger datagrams vanish; 0 = no limit
    planes: tuple[Literal["udp", "tcp"], ...] = ("udp", "tcp")
    refuse: bool = False  # the sender gets an error at once (connection refused, network unreachable), not silence
    factor: Seconds = 10.0  # how much slower
    dns: Dns = "all"
    keys: tuple[Count, ...] = ()  # the key ring from now on, primary first: numbers here, secrets in a run
    label: str = ""  # of the other cluster
    fault: str = ""  # of an engine, as JSON for its /admin/faults
    chats_per_s: Seconds = 0.0
    packets_per_s: Seconds = 0.0


@STRICT
@dataclass(frozen=True, slots=True)
class Expect:
    """Bounds for the nodes that run at the end (or those of the last `core` step). None: not checked."""

    failed_requests_max: Count | None = None  # without those that were streaming on a killed node or engine
    agree_s: Seconds | None = None  # from `quiet_at` until every node knows exactly which nodes run
    one_reader: bool = False  # at the end each engine's events are read by one node
    exact: bool = False  # … which knows all blocks of the engine
    wrong_share_max: Seconds | None = None  # of all nodes' claims at the end, those on what an engine does not hold
    unknown_share_max: Seconds | None = None  # of what engines hold at prompts' depths, the part unknown to nodes
    same_routes_s: Seconds | None = None  # from `quiet_at`, or the last traffic, until no bucket differs
    dead_s: Seconds | None = None  # until every running node knows of a kill that lasts
    learned_s: Seconds | None = None  # until a running node's route update is at all others (p99)
    false_deaths_max: Count | None = None  # (observer, subject) pairs, over the whole run
    hit_share_min: Seconds | None = None  # hit rate of the last third over that before the first step
    hits_back_s: Seconds | None = None  # from the last step until 95 % of that rate is back; processes only
    hit_points_lost_max: Seconds | None = None  # of engines that cache, to a run without any step; processes only
    uneven_share_max: Share | None = None  # of the time, one working engine idle while another's wait; processes only
    bytes_per_node_s_max: Seconds | None = None  # mean over the run, sent, all planes


@STRICT
@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    about: str
    for_s: Seconds
    cluster: Cluster = field(default_factory=Cluster)
    load: Load | None = None
    steps: Annotated[tuple[Step, ...], Field(alias="step")] = ()
    expect: Expect = field(default_factory=Expect)
    runs_on: tuple[Harness, ...] = HARNESSES


READER = TypeAdapter(Scenario)


class Verb(NamedTuple):
    """A kind of step: the keys that it needs and may have, and how a driver carries it out.

    A driver's method `do_METHOD(step, whom)` is called for each of `whom`, `every_s` apart, and returns a function that
    undoes the step. That is called after the number of seconds under the key `lasts`; never, if that is 0.
    """

    needs: tuple[str, ...] = ()
    may: tuple[str, ...] = ()
    whom: str = "node"  # node, engine, nodes (all at once, or one by one with every_s), all (once for the whole step)
    method: str = ""  # if it is not named like the verb
    lasts: str = "for_s"
    runs_on: tuple[str, ...] = HARNESSES


LINK = ("loss", "delay_s", "jitter_s", "duplicate", "reorder", "reorder_s", "corrupt", "mtu")
SIM: tuple[Harness, ...] = ("sim",)
PROCESSES: tuple[Harness, ...] = ("processes",)
VERBS: Mapping[str, Verb] = {
    "start": Verb(("nodes",), ("every_s", "keep_state")),
    "stop": Verb(("nodes",), ("every_s",)),  # orderly: the node says goodbye
    "kill": Verb(("nodes",), ("every_s",)),
    "restart": Verb(("nodes",), ("every_s", "down_s", "keep_state"), method="kill", lasts="down_s"),
    "roll": Verb(("nodes",), ("every_s", "down_s", "keep_state"), method="stop", lasts="down_s"),
    "pause": Verb(("nodes", "for_s"), ("every_s",)),  # SIGSTOP, SIGCONT
    "slow": Verb(("nodes", "factor"), ("for_s",)),  # less of a processor
    "disk_full": Verb(("nodes",), ("for_s",)),
    "descriptors": Verb(("nodes", "for_s"), ("every_s",), runs_on=PROCESSES),  # hardly a file descriptor left
    "cut": Verb(("nodes",), ("others", "one_direction", "planes", "refuse", "for_s", "every_s"), "nodes"),
    "link": Verb(("nodes",), ("others", "one_direction", "for_s", *LINK), "nodes"),  # at least one of LINK
    "heal": Verb(whom="all"),  # ends every cut and link
    "core": Verb(("nodes",), whom="all"),  # these run, and all between them is well for good; nothing else is mended
    "dns": Verb(("dns",), ("nodes", "for_s"), "all"),  # for these nodes, default all
    "keys": Verb(("nodes", "keys"), ("every_s",)),
    "foreign": Verb(("nodes", "label")),  # these addresses belong to another cluster from now on (restart)
    "flood": Verb(("nodes", "chats_per_s", "for_s"), runs_on=SIM),  # so many chats there, whoever asks
    "attack": Verb(("nodes", "packets_per_s", "for_s"), runs_on=SIM),  # replayed, misdirected and forged packets
    "engine_stop": Verb(("engines",), ("for_s",), "engine"),
    "engine_restart": Verb(("engines",), ("down_s",), "engine", "engine_stop", "down_s"),  # with an empty cache
    "engine_slow": Verb(("engines", "factor"), ("for_s",), "engine"),
    "engine_fault": Verb(("engines", "fault", "for_s"), (), "engine", runs_on=PROCESSES),
    "engine_moves": Verb(("engines", "for_s"), (), "engine", runs_on=PROCESSES),  # its name, while the old one runs on
    "events_cut": Verb(("engines",), ("for_s",), "engine", runs_on=SIM),  # no node reaches the publisher
    "events_loss": Verb(("engines", "loss"), ("for_s",), "engine", runs_on=SIM),  # share of its messages
    "events_garbage": Verb(("engines", "for_s"), (), "engine", runs_on=SIM),  # its messages are unreadable
    "events_strange": Verb(("engines", "for_s"), (), "engine", runs_on=SIM),  # encoded as by an unknown version
    "load": Verb(("chats_per_s",), ("for_s",), "all"),
    "poison": Verb(("chats_per_s", "for_s"), (), "all", runs_on=PROCESSES),  # requests that all engines answer with 500
}


def scenario_names() -> list[str]:
    """Return the names of the scenarios that come with the lab."""
    return sorted(path.stem for path in SCENARIOS.glob("*.toml"))


def load_scenario(name_or_path: str) -> Scenario:
    """Load a scenario of the lab by name, or a file by its path (ending in .toml). Raises ScenarioError, OSError."""
    path = Path(name_or_path) if name_or_path.endswith(".toml") else SCENARIOS / f"{name_or_path}.toml"
    if not path.exists() and not name_or_path.endswith(".toml"):
        raise ScenarioError(f"no scenario {name_or_path!r}; there are: {', '.join(scenario_names())}")
    return read_scenario(path.read_text(), path.stem, str(path))


def settled(
    name: str, harness: Harness, seed: int, nodes: int | None, engines: int | None, for_s: float | None
) -> Scenario:
    """Load a scenario for this harness, in the given sizes, and draw its victims. Raises ScenarioError, OSError."""
    found = load_scenario(name)
    if harness not in found.runs_on:
        raise ScenarioError(f"{name}: not for {harness}, only for {', '.join(found.runs_on)}")
    cluster = replace(found.cluster, nodes=nodes or found.cluster.nodes, engines=engines or found.cluster.engines)
    changed = replace(found, cluster=cluster, for_s=for_s or found.for_s)
    check(changed, name)
    return settle(changed, seed)


def read_scenario(text: str, name: str, place: str = "scenario") -> Scenario:
    """Parse and check a scenario. Errors call the text `place`. Raises ScenarioError."""
    try:
        table = {"name": name, **tomllib.loads(text)}
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"{place}: {error}") from error
    steps = table.get("step", [])
    if not isinstance(steps, list):
        raise ScenarioError(f"{place}: write [[step]], with two brackets")
    for number, step in enumerate(steps, 1):
        check_keys(step, f"{place}: step {number}")
    try:
        found = READER.validate_json(json.dumps(table, default=str), strict=True)
    except ValidationError as error:
        raise ScenarioError(f"{place}: {mistake(error)}") from error
    check(found, place)
    return found


def check_keys(step: Any, place: str) -> None:
    """Check that a step has all keys that its verb needs, and none that it does not take. Raises ScenarioError."""
    if not isinstance(step, dict) or "do" not in step:
        raise ScenarioError(f"{place}: a step needs do = VERB")
    verb = step["do"]
    if verb not in VERBS:
        raise ScenarioError(f"{place}: no verb {verb!r}; there are: {', '.join(VERBS)}")
    needed, allowed = ("at_s", "do", *VERBS[verb].needs), VERBS[verb].may
    for key in needed:
        if key not in step:
            raise ScenarioError(f"{place} ({verb}): {key} is missing")
    for key in step:
        if key not in (*needed, *allowed):
            raise ScenarioError(f"{place}: {verb} takes no {key!r}; it takes {', '.join((*needed, *allowed))}")
    if verb == "link" and not step.keys() & {*LINK}:
        raise ScenarioError(f"{place} ({verb}): say at least one of {', '.join(LINK)}")


def mistake(error: ValidationError) -> str:
    """Describe the first mistake, with its place."""
    first = error.errors()[0]
    *above, key = (str(part + 1) if isinstance(part, int) else part for part in first["loc"])
    where = f"[{' '.join(above)}] " if above else ""
    if first["type"] == "missing":
        return f"{where}{key} is missing"
    if first["type"] == "unexpected_keyword_argument":
        return f"{where}no key {key!r}"
    return f"{where}{key}: {first['input']!r}: {first['msg']}"


def check(scenario: Scenario, place: str) -> None:
    """Check what the types do not express. Raises ScenarioError."""
    cluster = scenario.cluster
    if cluster.nodes < 1 or scenario.for_s <= 0:
        raise ScenarioError(f"{place}: want at least one node and some time")
    if cluster.names and len(cluster.names) != cluster.nodes:
        raise ScenarioError(f"{place}: [cluster] names: {len(cluster.names)} of them for {cluster.nodes} nodes")
    check_selector(cluster.running, cluster.nodes, f"{place}: [cluster] running")
    check_selector(cluster.ranked, cluster.engines, f"{place}: [cluster] ranked")
    if cluster.formed and (cluster.spread_s or cluster.names or "processes" in scenario.runs_on):
        raise ScenarioError(f"{place}: [cluster] formed: all start at once, under own names, and runs_on = ['sim']")
    before = 0.0
    for number, step in enumerate(scenario.steps, 1):
        where = f"{place}: step {number} ({step.do})"
        if step.at_s < before or step.at_s > scenario.for_s:
            raise ScenarioError(f"{where}: at_s = {step.at_s:g}, want {before:g} … {scenario.for_s:g}, in order")
        before = step.at_s
        check_step(step, cluster, where)


def check_step(step: Step, cluster: Cluster, where: str) -> None:
    check_selector(step.nodes, cluster.nodes, f"{where}: nodes")
    check_selector(step.others, cluster.nodes, f"{where}: others")
    check_selector(step.engines, cluster.engines, f"{where}: engines")
    if step.do == "keys" and not step.keys:
        raise ScenarioError(f"{where}: keys: want one at least")
    if step.do.startswith("events") and not cluster.events:
        raise ScenarioError(f"{where}: engines publish events where [cluster] events = true")


def check_selector(selector: Selector, count: int, where: str) -> None:
    if isinstance(selector, tuple):
        if any(number >= count for number in selector):
            raise ScenarioError(f"{where}: {list(selector)}: there are 0 … {count - 1}")
    elif selector not in WORDS and not (selector.endswith("%") and selector[:-1].isdecimal()):
        raise ScenarioError(f"{where}: {selector!r}; want numbers or one of {', '.join(WORDS)}, 30%")


def settle(scenario: Scenario, seed: int) -> Scenario:
    """Turn every selector into sorted numbers. A share of the nodes is rounded, and at least one."""
    rng = Random(f"{seed}/{scenario.name}/victims")
    cluster = scenario.cluster
    steps: list[Step] = []
    for step in scenario.steps:
        default = "all" if step.do == "dns" and step.nodes == "none" else step.nodes
        nodes = picked(default, cluster.nodes, rng)
        others = picked(step.others, cluster.nodes, rng, without=nodes)
        engines = picked(step.engines, cluster.engines, rng)
        steps.append(replace(step, nodes=nodes, others=others, engines=engines))
    running = picked(cluster.running, cluster.nodes, rng)
    ranked = picked(cluster.ranked, cluster.engines, rng)
    return replace(scenario, steps=tuple(steps), cluster=replace(cluster, running=running, ranked=ranked))


def without_faults(scenario: Scenario) -> Scenario:
    """Return the same load on the same nodes and engines, but nothing happens, and all engines are alike."""
    steps = tuple(step for step in scenario.steps if step.do == "load")
    expect = Expect(scenario.expect.failed_requests_max, uneven_share_max=scenario.expect.uneven_share_max)
    return replace(scenario, steps=steps, cluster=replace(scenario.cluster, ranked=()), expect=expect)


def picked(selector: Selector, count: int, rng: Random, without: Sequence[int] = ()) -> tuple[int, ...]:
    """The numbers that a selector means, sorted."""
    if isinstance(selector, tuple):
        return selector
    if selector in ("all", "none", "rest"):
        return tuple(number for number in range(count) if selector != "none" and number not in without)
    share = {"one": 0.0, "half": 0.5}.get(selector)
    if share is None:
        share = int(selector[:-1]) / 100
    return tuple(sorted(rng.sample(range(count), min(count, max(1, round(share * count))))))


def quiet_at(scenario: Scenario) -> float:
    """Return the second at which the last step has happened and was undone. Bounds of `expect` count from it."""
    ends = [0.0, scenario.cluster.spread_s]
    for step in scenario.steps:
        turns = len(step.nodes) if isinstance(step.nodes, tuple) else scenario.cluster.nodes
        down = step.down_s if step.do in ("restart", "roll", "engine_restart") else 0.0
        ends.append(step.at_s + step.every_s * max(0, turns - 1) + step.for_s + down)
    return max(ends)


def numbers(selector: Selector) -> tuple[int, ...]:
    """Return the numbers of a selector that `settle` has turned into numbers."""
    assert isinstance(selector, tuple), "settle the scenario first"
    return selector


def targets(step: Step) -> list[Any]:
    """Return the values of `whom` for a settled step, one for each call of its method, see `Verb.whom`."""
    match VERBS[step.do].whom:
        case "node":
            return [*numbers(step.nodes)]
        case "engine":
            return [*numbers(step.engines)]
        case "nodes" if step.every_s > 0:
            return [(number,) for number in numbers(step.nodes)]
    return [numbers(step.nodes)]


def rule_of(step: Step, nodes: Sequence[int], addresses: Sequence[Hashable]) -> Rule:
    """Return the rule for a cut or bad link between these nodes and the others; among themselves if there are none."""
    others = numbers(step.others) or nodes
    return Rule(
        frozenset(addresses[number] for number in nodes),
        frozenset(addresses[number] for number in others),
        Link(
            cut=step.do == "cut",
            refuse=step.refuse,
            mtu=step.mtu or PERFECT.mtu,
            **{name: getattr(step, name) for name in LINK if name != "mtu"},
        ),
        step.one_direction,
        frozenset(plane for name in step.planes for plane in PLANES[name]),
    )


def write_scenario(scenario: Scenario) -> str:
    """Write a scenario as TOML that `read_scenario` reads back equal, so that a failing schedule can be kept."""
    head = ("name", "about", "for_s", "runs_on")
    lines = [f"{name} = {json.dumps(getattr(scenario, name))}" for name in head]
    for key, part in (("cluster", scenario.cluster), ("load", scenario.load), ("expect", scenario.expect)):
        if part is not None:
            lines += ["", f"[{key}]", *_lines(part)]
    for step in scenario.steps:
        needed, allowed = VERBS[step.do].needs, VERBS[step.do].may
        always = ("at_s", "do", *needed, *(("loss",) if step.do == "link" else ()))
        lines += ["", "[[step]]", *_lines(step, ("at_s", "do", *needed, *allowed), always)]
    return "\n".join(lines) + "\n"


def _lines(part: Any, names: Sequence[str] = (), always: Sequence[str] = ()) -> list[str]:
    found: list[str] = []
    for one in fields(part):
        value = getattr(part, one.name)
        wanted = (not names or one.name in names) and (value != one.default or one.name in always)
        if wanted and value is not None:
            found.append(f"{one.name} = {json.dumps(value)}")
    return found
