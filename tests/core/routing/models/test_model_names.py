"""Which backends serve a model, by the names that they list, and which names come near one that none serves."""

from ranvier_py.core.errors import NoBackend, NotFound
from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.backends import BackendLimits, ProbeResult, Registry
from ranvier_py.core.routing.models.model_names import COMPARED_MAX
from ranvier_py.core.routing.pools import POOLS_MAX
from tests.core.routing.test_backends import cluster, names, serving


def test_each_model_goes_to_those_that_list_it() -> None:
    registry = cluster(3)
    for number, models in enumerate([("base", "adapter"), ("base",), ("other",)]):
        registry.changes.probed(BackendId(number), serving(*models), 0)
    for model, expected in [("base", "e0 e1"), ("adapter", "e0"), ("other", "e2"), ("", "e0 e1 e2")]:
        assert names(registry.pools.pool(model, 0)) == expected


def test_a_model_that_nobody_lists_goes_to_those_whose_list_is_not_known_yet() -> None:
    registry = cluster(2)
    registry.changes.probed(BackendId(0), serving("base"), 0)
    assert names(registry.pools.pool("new", 0)) == "e1"
    registry.changes.probed(BackendId(1), serving("base"), 0)
    pool = registry.pools.pool("new", 0)
    assert (pool.ids, pool.unknown) == ((), True)
    error = registry.pools.names.error(pool, "new")
    assert isinstance(error, NotFound)
    assert str(error) == "The model `new` does not exist"


def of_sglang(*models: str) -> ProbeResult:
    return ProbeResult(True, models=models, cards=tuple({"id": model, "owned_by": "sglang"} for model in models))


def test_a_model_that_nobody_lists_may_be_an_adapter_or_the_default_of_sglang() -> None:
    registry = cluster(5)
    registry.changes.probed(BackendId(0), of_sglang("base", "sql"), 0)
    registry.changes.probed(BackendId(1), of_sglang("base"), 0)
    registry.changes.probed(BackendId(2), of_sglang("other", "a:b"), 0)
    registry.changes.probed(BackendId(3), serving("base"), 0)
    registry.changes.probed(BackendId(4), serving("base:sql", "a"), 0)
    for _ in range(2):
        for model, expected in [
            *(("base", "e0 e1 e3"), ("base:new", "e0 e1"), ("base:new:2", "e0 e1"), ("other:new", "e2")),
            *(
                ("default", "e0 e1 e2"),
                ("default:sql", "e0"),
                ("default:new", "e0 e1 e2"),
                ("nobody:sql", ""),
                ("nobody", ""),
                ("a:b", "e2"),
            ),
            *(("base:sql", "e4"), ("a:new", ""), (":sql", ""), ("base:", "e0 e1"), ("Default", "")),  # listed wholly
        ]:
            assert names(registry.pools.pool(model, 0)) == expected, model
            assert registry.pools.pool(model, 0).unknown is (not expected)
    assert len(registry.pools) <= 2 * len(registry.pools.names.listed) + 3


def test_an_adapter_whose_engines_are_all_gone_is_unavailable_not_unknown() -> None:
    registry = cluster(1)
    registry.changes.probed(BackendId(0), of_sglang("base"), 0)
    registry.drain("e0")
    for model, status in [("base:sql", 503), ("default", 503), ("nobody:sql", 404)]:
        assert registry.pools.names.error(registry.pools.pool(model, 0), model).status == status


def test_a_listed_model_whose_backends_are_all_gone_is_unavailable_not_unknown() -> None:
    registry = cluster(2)
    registry.changes.probed(BackendId(0), serving("a"), 0)
    registry.changes.probed(BackendId(1), serving("b"), 0)
    registry.drain("e0")
    error = registry.pools.names.error(registry.pools.pool("a", 0), "a")
    assert isinstance(error, NoBackend)
    assert error.status == 503
    registry.remove("e0")
    assert registry.pools.pool("a", 0).unknown


def test_names_that_clients_invent_do_not_fill_the_cache() -> None:
    registry = cluster(2)
    for number in range(1000):
        registry.pools.pool(f"invented-{number}", 0)
    assert len(registry.pools) == 1


def test_an_adapter_that_was_unloaded_is_no_longer_served() -> None:
    registry = cluster(1)
    registry.changes.probed(BackendId(0), serving("base", "adapter"), 0)
    [change] = registry.changes.probed(BackendId(0), serving("base"), 0)
    assert (change.what, change.before, change.after) == ("models", "adapter,base", "base")
    assert registry.pools.pool("adapter", 0).unknown
    empty = Registry(BackendLimits()).pools.pool("adapter", 0)
    assert (empty.ids, empty.unknown) == ((), False), "without any backend nothing is known of models"


def test_backends_that_take_any_name_get_those_that_nobody_lists_and_no_others() -> None:
    registry = cluster(3)
    registry.add("http://10.0.0.9:8000", name="any", any_model=True)
    for number, models in enumerate([("base",), ("base", "sql"), ("other",), ("file.gguf",)]):
        probe = of_sglang if number == 1 else serving
        registry.changes.probed(BackendId(number), probe(*models), 0)
    for model, expected in [
        *(("base", "e0 e1"), ("other", "e2"), ("gpt-4o", "any"), ("file.gguf", "any"), ("", "e0 e1 e2 any")),
        *(("base:sql", "e1"), ("base:new", "e1"), ("default", "e1"), ("other:new", "any"), (":", "any")),
    ]:
        assert names(registry.pools.pool(model, 0)) == expected, model
    registry.drain("e2")
    assert names(registry.pools.pool("other", 0)) == "", "its engines may come back"
    assert not registry.pools.names.lacks(registry, "whatever")


def test_names_that_differ_by_case_or_in_path_are_near() -> None:
    registry = cluster(1)
    registry.changes.probed(BackendId(0), serving("meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-8B", "sql-lora"), 0)
    for wrong, right in [
        *(("llama3", "meta-llama/Llama-3.1-8B-Instruct"), ("qwen", "Qwen/Qwen3-8B"), ("SQL_Lora", "sql-lora")),
        *(("gpt-4o", ""), ("🙂", ""), ("x" * 10_000, ""), ("*", ""), ("../..", ""), (":", "")),
    ]:
        assert " ".join(registry.pools.names.nearest(wrong)) == right, wrong
    assert "Qwen3-8B" in str(registry.pools.names.missing("qwen"))


def test_aliases_are_near_as_well_but_none_that_may_not_be_used() -> None:
    registry = cluster(1)
    registry.changes.probed(BackendId(0), serving("llama-8b", "qwen-72b"), 0)
    names, aliases = registry.pools.names, {"gpt-4o": "llama-8b", "gpt-4o-mini": "qwen-72b"}
    assert names.nearest("gpt4o", aliases=aliases) == ["gpt-4o", "gpt-4o-mini"]
    assert names.nearest("gpt4o", lambda name: name in ("qwen-72b", "x"), aliases) == ["gpt-4o-mini"]
    assert names.nearest("gpt4o", lambda name: name == "gpt-4o", aliases) == ["gpt-4o"]
    assert names.nearest("llama", aliases={"llama-8b": "qwen-72b"}) == ["llama-8b"]


def test_of_many_names_a_bounded_number_is_compared() -> None:
    registry = cluster(1)
    registry.changes.probed(BackendId(0), serving(*(f"adapter-{number}" for number in range(4 * COMPARED_MAX))), 0)
    assert registry.pools.names.nearest(f"adapter-{COMPARED_MAX - 1}")[0] == f"adapter-{COMPARED_MAX - 1}"
    assert len(registry.pools.names.nearest(f"adapter-{3 * COMPARED_MAX}")) == 3


def test_what_clients_invent_does_not_fill_the_pools_where_engines_have_adapters() -> None:
    registry = cluster(1)
    registry.changes.probed(BackendId(0), of_sglang(*(f"m{number}" for number in range(100))), 0)
    for base in range(100):
        for adapter in range(100):
            registry.pools.pool(f"m{base}:m{adapter}", 0)
    assert len(registry.pools) <= POOLS_MAX
