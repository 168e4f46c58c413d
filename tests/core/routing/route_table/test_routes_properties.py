"""The route table against a plain dict of every prefix, and its invariants under any input whatever."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.placement import Holder
from ranvier_py.core.routing.route_table import RouteTable, Trust, Unheld
from ranvier_py.core.routing.route_table.route_values import LRU
from ranvier_py.core.routing.route_table.rows import LANES, SHARED, TEXTS_MAX
from ranvier_py.core.splitmix import mix
from tests.builders.route_tables import route_table
from tests.examples import examples

BACKENDS = 3
BLOCK = 16
TTL_S = 20.0
ANCHORS = (16, 32, 64, 128)

Message = tuple[str, int]  # a character and a length in tokens
Prompt = tuple[str, tuple[Message, ...]]  # namespace and messages
Prefix = tuple[str, str]  # namespace and the tokens, one character each


def tokens_of(messages: tuple[Message, ...]) -> str:
    """A message starts with a marker of its own, as in a chat template: equal tokens have equal boundaries."""
    return "".join(character.upper() + character * (length - 1) for character, length in messages)


class Names:
    """A distinct number for each prefix of tokens and of messages: a fingerprint without collisions."""

    def __init__(self) -> None:
        self.known: dict[object, int] = {}

    def of(self, what: object) -> int:
        return self.known.setdefault(what, len(self.known) + 1)


def prefixes(prompt: Prompt) -> list[tuple[Prefix, Prompt | None]]:
    """The whole chain, deepest first: each block-aligned prefix, and the messages where it is a boundary."""
    namespace, messages = prompt
    text = tokens_of(messages)
    chain: list[tuple[Prefix, Prompt | None]] = []
    start = 0
    for count in range(1, len(messages) + 1):
        end = len(tokens_of(messages[:count])) // BLOCK * BLOCK
        chain.extend(((namespace, text[:anchor]), None) for anchor in ANCHORS if start < anchor < end)
        chain.append(((namespace, text[:end]), (namespace, messages[:count])))
        start = end
    return chain[::-1]


@dataclass
class Known:
    """What the model keeps of one prefix."""

    parent: Prefix | None
    used: int
    claims: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # backend -> generation, trust, second


class Model:
    """Every prefix in a dict; every rule applied to each row in turn."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.known: dict[Prefix, Known] = {}

    def path(self, prompt: Prompt) -> list[Prefix]:
        return list(dict.fromkeys(prefix for prefix, _ in prefixes(prompt) if prefix[1]))

    def use(self, prefix: Prefix | None, second: int) -> None:
        while prefix is not None:
            self.known[prefix].used = max(self.known[prefix].used, second)
            prefix = self.known[prefix].parent

    def claim(self, prefix: Prefix, backend: int, generation: int, trust: int, now: float) -> None:
        claims = self.known[prefix].claims
        old = claims.get(backend)
        if old is not None and old[0] == generation and old[2] > now - TTL_S:
            trust = max(old[1], trust)
        claims[backend] = (generation, trust, int(now))

    def best(self, prefix: Prefix, generations: list[int], now: float) -> list[Holder]:
        live = [
            (-trust, -second, backend)
            for backend, (generation, trust, second) in self.known[prefix].claims.items()
            if generations[backend] == generation and second > now - TTL_S
        ]
        return [Holder(BackendId(backend), len(prefix[1]), -trust) for trust, _, backend in sorted(live)]

    def match(self, prompt: Prompt, generations: list[int], now: float, wanted: int) -> list[Holder]:
        found: list[Holder] = []
        for prefix in self.path(prompt):
            if prefix not in self.known or len(found) >= wanted:
                continue
            new = [h for h in self.best(prefix, generations, now) if h.backend not in {f.backend for f in found}]
            if new:
                self.use(prefix, int(now))
            found += new
        return found

    def leaves(self) -> list[Prefix]:
        parents = {known.parent for known in self.known.values()}
        return [prefix for prefix in self.known if prefix not in parents]

    def rank(self, prefix: Prefix) -> tuple[int, int]:
        known = self.known[prefix]
        return max(trust for _, trust, _ in known.claims.values()), known.used

    def evict(self, gone: set[Prefix], path: list[Prefix]) -> bool:
        """Remove what the table has removed, each a leaf that is first in order then. False: in no order it was.

        Equal ranks are equally good, and which one goes decides what comes next.
        """
        if not gone:
            return True
        candidates = [leaf for leaf in self.leaves() if leaf not in path]
        first = min(self.rank(leaf) for leaf in candidates)
        for leaf in candidates:
            if self.rank(leaf) == first and leaf in gone:
                kept = self.known.pop(leaf)
                if self.evict(gone - {leaf}, path):
                    return True
                self.known[leaf] = kept
        return False

    def drop(self, generations: list[int], now: float) -> None:
        """A full sweep: dead claims go, then leaves without claims, from the deep end."""
        for known in self.known.values():
            for backend, (generation, _, second) in list(known.claims.items()):
                if second <= now - TTL_S or generation != generations[backend]:
                    del known.claims[backend]
        self.prune()

    def prune(self) -> None:
        while empty := [leaf for leaf in self.leaves() if not self.known[leaf].claims]:
            for leaf in empty:
                del self.known[leaf]


def check(table: RouteTable, generations: list[int], now: float) -> None:
    """All invariants of the table, by looking at every row."""
    rows, claims = table.rows, table.claims
    placed = [row for row in range(1, len(rows.parent)) if rows.parent[row] >= 0]
    assert len(placed) == len(table) == table.counters.rows <= table.counters.capacity
    counts: Counter[int] = Counter()
    children: Counter[int] = Counter()
    names = 0
    for row in placed:
        own = dict(claims.of(row))
        counts.update(claim.trust for claim in own.values())
        children[rows.parent[row]] += 1
        assert not rows.is_above(row, row), "a circle"
        assert rows.best[row] == max((claim.trust for claim in own.values()), default=0)
        assert rows.child[row] or own, "a leaf without claims"
        assert bool(rows.flags[row] & SHARED) is (len(own) > 1)
        fingerprints = [fingerprint for fingerprint in (rows.token[row], *rows.texts(row)) if fingerprint]
        assert fingerprints
        assert all(rows.index[fingerprint] == row for fingerprint in fingerprints)
        names += len(fingerprints)
        check_monotone(table, row, generations, now)
        check_queued(table, row)
    assert names == len(rows.index) == table.counters.fingerprints
    assert all(len(list(rows.children(row))) == children[row] for row in (0, *placed))
    stored = table.counters.claims
    assert tuple(stored.values()) == tuple(counts[trust] for trust in LANES)
    assert not table.tree.pinned
    assert not table.tree.moved


def check_monotone(table: RouteTable, row: int, generations: list[int], now: float) -> None:
    rows, claims = table.rows, table.claims
    parent = rows.parent[row]
    assert parent == 0 or rows.parent[parent] >= 0, "an orphan"
    for backend, (generation, trust, evidence) in claims.of(row):
        if parent and generation == generations[backend] and evidence > now - TTL_S:
            above = claims.get(parent, backend)
            assert above is not None
            assert above.generation == generation
            assert above.trust >= trust
            assert above.evidence >= evidence


def check_queued(table: RouteTable, row: int) -> None:
    rows = table.rows
    lane = rows.lane[row]
    if not rows.child[row]:
        assert lane, "a leaf that can never be evicted"
        assert (lane & LANES[-1], rows.bucket[row]) <= (rows.best[row], rows.used[row])
    if lane:
        assert rows.newer[rows.older[row]] == rows.older[rows.newer[row]] == row
        assert table.leaves.heads[lane][rows.bucket[row]]


messages = st.tuples(st.sampled_from("ab"), st.sampled_from((5, 20, 24, 50, 70)))
prompts = st.tuples(st.sampled_from(("model", "tenant")), st.lists(messages, min_size=1, max_size=4).map(tuple))
backends = st.integers(0, BACKENDS - 1)
trusts = st.sampled_from(Trust)


class Passing(RuleBasedStateMachine):
    """Time passes and engines restart."""

    def begin(self, capacity: int) -> None:
        self.table = route_table(capacity=capacity, ttl_s=TTL_S, eviction=LRU)
        self.generations = [0] * BACKENDS
        self.now = 0.0

    @rule(seconds=st.sampled_from((0.3, 1.0, 7.5, 15.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(backend=backends)
    def restart(self, backend: int) -> None:
        self.generations[backend] += 1


class AgainstTheModel(Passing):
    """Whole chains with both fingerprints, a table that may be full: everything is equal to the model."""

    @initialize(capacity=st.sampled_from((8, 10, 14, 1000)))  # the longest chain has 8 rows
    def start(self, capacity: int) -> None:
        self.begin(capacity)
        self.model = Model(capacity)
        self.names = Names()

    def chain(self, prompt: Prompt) -> list[PrefixKey]:
        return [
            (
                len(prefix[1]),
                self.names.of(prefix) if prefix[1] else 0,
                self.names.of(("text", boundary)) if boundary else 0,
            )
            for prefix, boundary in prefixes(prompt)
        ]

    def is_known(self, prefix: Prefix) -> bool:
        return self.names.of(prefix) in self.table.rows.index

    @rule(prompt=prompts, backend=backends, trust=trusts)
    def learn(self, prompt: Prompt, backend: int, trust: Trust) -> None:
        model, path = self.model, self.model.path(prompt)
        new = [prefix for prefix in path if prefix not in model.known]
        created = self.table.learn(self.chain(prompt), BackendId(backend), self.generations[backend], trust, self.now)
        assert created == len(new)
        gone = {prefix for prefix in model.known if not self.is_known(prefix)}
        assert len(gone) == max(0, len(model.known) + len(new) - model.capacity)
        assert model.evict(gone, path), "the table kept a leaf that is before those which it evicted"
        for prefix, parent in pairwise([*path, None]):
            if prefix in new:
                model.known[prefix] = Known(parent, 0)
        for prefix in path:
            model.claim(prefix, backend, self.generations[backend], trust, self.now)
        if path:
            model.use(path[0], int(self.now))

    @rule(prompt=prompts, wanted=st.integers(1, 3), out=st.none() | backends)
    def match(self, prompt: Prompt, wanted: int, out: int | None) -> None:
        generations = [-1 if backend == out else generation for backend, generation in enumerate(self.generations)]
        expected = self.model.match(prompt, generations, self.now, wanted)
        unheld = Unheld()
        chain = self.chain(prompt)
        assert self.table.match(chain, generations, self.now, wanted=wanted, unheld=unheld) == expected
        assert unheld == [key for key in chain if not expected or key[0] > expected[0].tokens]

    @rule(prompt=prompts)
    def match_by_text(self, prompt: Prompt) -> None:
        """Boundaries alone find the deepest boundary."""
        chain = [(tokens, 0, text) for tokens, _, text in self.chain(prompt) if text]
        boundaries = {prefix for prefix, boundary in prefixes(prompt) if boundary}
        rows = [prefix for prefix in self.model.path(prompt) if prefix in boundaries and self.is_known(prefix)]
        named = {
            view for prefix in rows for view in self.table.rows.texts(self.table.rows.index[self.names.of(prefix)])
        }
        expected: list[Holder] = []
        for prefix, boundary in prefixes(prompt):
            if boundary and self.names.of(("text", boundary)) in named and not expected:
                expected = self.model.best(prefix, self.generations, self.now)
        assert self.table.match(chain, self.generations, self.now, touch=False) == expected

    @rule(prompt=prompts, backend=backends, depth=st.integers(0, 9))
    def withdraw(self, prompt: Prompt, backend: int, depth: int) -> None:
        path = self.model.path(prompt)
        if not path:
            return
        prefix = path[depth % len(path)]
        known = self.model.known.get(prefix)
        assert self.table.withdraw(self.names.of(prefix), BackendId(backend)) == bool(known and backend in known.claims)
        if known is None or backend not in known.claims:
            return
        for other, below in self.model.known.items():
            above: Prefix | None = other
            while above is not None and above != prefix:
                above = self.model.known[above].parent
            if above == prefix:
                below.claims.pop(backend, None)
        self.model.prune()

    @rule()
    def sweep(self) -> None:
        self.table.sweep(self.now, self.generations)
        self.model.drop(self.generations, self.now)

    @invariant()
    def is_equal_and_sound(self) -> None:
        assert len(self.table) == len(self.model.known)
        assert all(self.is_known(prefix) for prefix in self.model.known)
        check(self.table, self.generations, self.now)


KEYS = {"text": (16, 0, 2), "text deeper": (32, 0, 2), "tokens": (16, 1, 0), "both": (16, 1, 2), "child": (48, 0, 3)}


@pytest.mark.parametrize(
    "before",
    [
        pytest.param(((("text",), 0.0), (("child", "text"), 0.0), (("tokens",), 30.0)), id="its child is moved"),
        pytest.param(((("tokens",), 0.0), (("text deeper", "tokens"), 0.0)), id="it hangs under the row of its tokens"),
    ],
)
def test_a_text_whose_row_a_sweep_left_without_claims_is_merged_once(
    before: tuple[tuple[tuple[str, ...], float], ...],
) -> None:
    """A sweep looks at some rows at a time, so a row may have lost its claims and keep children that have theirs."""
    table = route_table(capacity=100, ttl_s=TTL_S)
    for names, at in before:
        table.learn([KEYS[name] for name in names], BackendId(0), 0, Trust.REMOTE, at)
    table.sweep(30.0, [0], limit=1)
    table.learn([KEYS["both"]], BackendId(0), 0, Trust.REMOTE, 30.0)
    check(table, [0], 30.0)
    assert table.counters.merged == 1
    for number in range(10, 14):
        table.learn([(16, number, 0)], BackendId(0), 0, Trust.REMOTE, 30.0)
    check(table, [0], 30.0)


@pytest.mark.parametrize("late", [False, True], ids=["tokens known at once", "tokens known later"])
def test_of_prompts_with_equal_tokens_the_same_few_texts_are_kept_in_whatever_order_they_came(late: bool) -> None:
    """Clients may number what the template leaves out, such as names: each request brings a new text."""
    texts = [mix(number) for number in range(1, 3 * TEXTS_MAX)]
    kept = []
    for order in (texts, texts[::-1]):
        table = route_table(ttl_s=TTL_S)
        for text in order if late else ():
            table.learn([(64, 0, text)], BackendId(0), 0, Trust.LOCAL, 0.0)
        for text in order:
            table.learn([(64, 1, text)], BackendId(0), 0, Trust.LOCAL, 0.0)
        check(table, [0], 0.0)
        (view,) = table.subtree(0)
        kept.append(sorted(view.text_fingerprints))
        assert table.counters.texts_dropped == len(texts) - TEXTS_MAX
        assert table.match([(64, 1, max(texts))], [0], 0.0) == [Holder(BackendId(0), 64, Trust.LOCAL)]
    assert kept[0] == kept[1] == sorted(texts)[:TEXTS_MAX]


fingerprints = st.integers(0, 8)
soup = st.lists(
    st.tuples(
        st.integers(0, 9).map(lambda blocks: blocks * BLOCK),
        fingerprints,
        fingerprints.map(lambda text: text and text + 100),
    ),
    max_size=6,
)


class AnyChain(Passing):
    """Keys that contradict each other, texts without tokens, bare claims of peers: the table stays sound."""

    @initialize(capacity=st.integers(1, 12))
    def start(self, capacity: int) -> None:
        self.begin(capacity)

    @rule(chain=soup, backend=backends, trust=trusts, age=st.sampled_from((0.0, 0.0, 5.0)), late=st.booleans())
    def learn(self, chain: list[PrefixKey], backend: int, trust: Trust, age: float, late: bool) -> None:
        generation = max(0, self.generations[backend] - late)
        self.table.learn(chain, BackendId(backend), generation, trust, max(0.0, self.now - age))

    @rule(chain=soup, wanted=st.integers(1, 3))
    def match(self, chain: list[PrefixKey], wanted: int) -> None:
        found = self.table.match(chain, self.generations, self.now, wanted=wanted)
        assert len({holder.backend for holder in found}) == len(found)

    @rule(fingerprint=fingerprints, backend=backends)
    def withdraw(self, fingerprint: int, backend: int) -> None:
        self.table.withdraw(fingerprint, BackendId(backend))

    @rule(limit=st.integers(1, 2000))
    def sweep(self, limit: int) -> None:
        self.table.sweep(self.now, self.generations, limit)

    @invariant()
    def is_sound(self) -> None:
        check(self.table, self.generations, self.now)
        assert len(self.table.subtree(0)) == len(self.table)


TIMES = settings(max_examples=examples(60), stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow])
AgainstTheModel.TestCase.settings = TIMES
AnyChain.TestCase.settings = TIMES
TestTheTableEqualsABruteForceModel = AgainstTheModel.TestCase
TestTheTableStaysSoundUnderAnyChain = AnyChain.TestCase
