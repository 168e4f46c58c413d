"""Tables of models where clients have keys: those of a tenant, aliases and fallbacks that a key may use or may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.node.access.key_lab import BLUE, RED, asked, bearer, key_lines, keys_file
from tests.node.access.test_limits_of_requests import counted
from tests.node.node_lab import lab, turn
from tests.node.test_model_fallbacks import FULL
from tests.node.test_models_by_name import Named
from tests.proxy.wire import answer

TENANTS = '[[tenant]]\nname = "gold"\n[[tenant]]\nname = "plain"\n'


def two_tenants(folder: Path, **red: object) -> Path:
    return keys_file(folder, key_lines(RED, tenant="gold", **red), key_lines(BLUE, tenant="plain"), TENANTS)


async def test_a_tenants_table_is_for_its_keys_alone_and_only_they_see_it(tmp_path: Path) -> None:
    tables = [
        {"name": "gpt-4o", "to": "small"},
        {"name": "gpt-*", "to": "large", "tenants": ["gold", "other"], "api_key": "of-large"},
        {"name": "own", "to": "large", "tenants": ["gold"]},
    ]
    small, large = Named("small"), Named("large")
    async with lab(small, large, model=tables, keys_file=two_tenants(tmp_path), backend_api_key="of-all") as node:
        found = {}
        for key in (RED, BLUE):
            listed = (await node.http.get(f"{node.url}/v1/models", headers=bearer(key))).json()["data"]
            one = await node.http.get(f"{node.url}/v1/models/own", headers=bearer(key))
            answers = [await asked(node, bearer(key), model=name) for name in ("gpt-4o", "gpt-5", "own")]
            shown = [each.headers.get("x-ranvier-model", str(each.status_code)) for each in answers]
            found[key] = sorted(card["id"] for card in listed), one.status_code, shown
    assert found == {
        RED: (["gpt-4o", "large", "own", "small"], 200, ["large"] * 3),
        BLUE: (["gpt-4o", "large", "small"], 404, ["small", "404", "404"]),
    }
    keys = {
        name: {each.fields[b"authorization"] for each in engine.came} for name, engine in (("s", small), ("l", large))
    }
    assert keys == {"s": {b"Bearer of-all"}, "l": {b"Bearer of-large", b"Bearer of-all"}}


async def test_a_key_may_use_an_alias_by_its_name_or_by_that_of_the_model(tmp_path: Path) -> None:
    tables = [{"name": "a", "to": "main"}, {"name": "b", "to": "main"}, {"name": "c", "to": "other"}]
    for models, allowed in ((["a"], ["a"]), (["main"], ["a", "b", "main"]), (["c", "main-*"], ["c"])):
        async with lab(Named("main", "other"), model=tables, keys_file=two_tenants(tmp_path, models=models)) as node:
            names = ("a", "b", "c", "main", "other")
            answers = {name: await asked(node, bearer(RED), model=name) for name in names}
            assert [name for name in names if answers[name].status_code == 200] == allowed
            for name in set(names) - set(allowed):
                error = answers[name].json()["error"]
                assert error["message"].startswith(f"The model `{name}` does not exist")
                assert not any(f"`{other}`" in error["message"] for other in set(names) - {name} - set(allowed))


async def test_of_several_targets_a_key_gets_those_alone_that_it_may_use(tmp_path: Path) -> None:
    """Else a part of its chats would find no model by the name, as soon as a new one has a share."""
    tables = [
        {"name": "chat", "to": {"main": 1, "next": 1}, "fallback": ["spare"]},
        {"name": "other", "to": "next", "fallback": ["main"]},
    ]
    for models, served in (
        (["main"], {"main"}),
        (["next"], {"next"}),
        (["chat"], {"main", "next"}),
        (["spare"], set()),
    ):
        key = two_tenants(tmp_path, models=models)
        async with lab(Named("main", "next", "spare"), model=tables, keys_file=key) as node:
            chats = [await asked(node, bearer(RED), model="chat", messages=turn(f"Chat {at}")) for at in range(8)]
            assert {each.headers.get("x-ranvier-model") for each in chats} == (served or {None})
            assert {each.status_code for each in chats} == {200 if served else 404}
            wrong = await asked(node, bearer(RED), model="other")
            assert wrong.status_code == (200 if models == ["next"] else 404), "a fallback is none of the targets"


async def test_the_error_for_a_wrong_name_names_the_nearest_aliases_that_the_key_may_use(tmp_path: Path) -> None:
    tables = [{"name": "gpt-4o", "to": "main"}, {"name": "gpt-4o-mini", "to": "small", "tenants": ["gold"]}]
    for models, near in ((["gpt-4o"], "`gpt-4o`"), (["small"], "`gpt-4o-mini`"), ([], "`gpt-4o`, `gpt-4o-mini`")):
        key = two_tenants(tmp_path, **({"models": models} if models else {}))
        async with lab(Named("main", "small"), model=tables, keys_file=key) as node:
            wrong = [await asked(node, bearer(RED), model="gpt4o")]
            wrong += [await node.http.get(f"{node.url}/v1/models/gpt4o", headers=bearer(RED))]
            wrong += [await asked(node, bearer(RED), model="gpt4o", messages=[])]
            for each in wrong:
                assert (
                    each.json()["error"]["message"] == f"The model `gpt4o` does not exist; the nearest names are {near}"
                )


async def test_a_fallback_must_be_permitted_to_the_key_by_its_own_name(tmp_path: Path) -> None:
    tables = [
        {"name": "a", "to": "main", "fallback": ["dear", "cheap"]},
        {"name": "e", "to": "gone", "fallback": ["dear"]},
    ]
    for models, served in ((["a", "cheap"], "cheap"), (["a"], ""), (["a", "dear"], "dear"), ([], "dear")):
        engines = Named("main", reply=FULL[0]), Named("dear"), Named("cheap")
        key = two_tenants(tmp_path, **({"models": models} if models else {}))
        async with lab(*engines, model=tables, keys_file=key) as node:
            answered = await asked(node, bearer(RED), model="a")
            assert (answered.status_code, answered.headers["x-ranvier-model"]) == (
                (200, served) if served else (429, "main")
            )
            empty = await asked(node, bearer(RED), model="e")
            assert empty.status_code == (200 if "dear" in models or not models else 404)


@pytest.mark.parametrize("limit", ["", '[[tenant.model_limits]]\nmodels = "dear"\ntokens_per_minute = 400\n'])
async def test_a_fallback_counts_for_the_limits_of_its_own_model_and_at_its_own_cost(
    tmp_path: Path, limit: str
) -> None:
    """What is spent of them refuses it, too; the first model took nothing."""
    tables = [{"name": "a", "to": "main", "fallback": ["dear"]}, {"name": "dear", "cost": {"input": 2, "output": 4}}]
    tenant = f'[[tenant]]\nname = "gold"\nbudget = [{{amount = 10000, window = "hour", unit = "cost"}}]\n{limit}'
    file = keys_file(tmp_path, key_lines(RED, tenant="gold"), tenant)
    main, dear = Named("main", reply=FULL[0]), Named("dear", reply=answer(counted(100, 50)))
    async with lab(main, dear, model=tables, keys_file=file) as node:
        for _ in range(2):
            answered = await asked(node, bearer(RED), model="a", max_tokens=20)
            assert (answered.status_code, answered.headers["x-ranvier-model"]) == (200, "dear")
        view = await node.ask("/admin/access")
        used = {each["limit"]: each["used"] for scope in view["limits"].values() for each in scope["limits"]}
        assert sorted(used.values()) == ([300, 800] if limit else [800]), used


async def test_a_fallback_takes_once_of_limits_that_hold_for_all_models(tmp_path: Path) -> None:
    table = {"name": "a", "to": "main", "fallback": ["dear"]}
    tenant = '[[tenant]]\nname = "gold"\ntokens_per_minute = 100000\nrequests_per_minute = 100\n'
    file = keys_file(tmp_path, key_lines(RED, tenant="gold"), tenant)
    main, dear = Named("main", reply=FULL[0]), Named("dear", reply=answer(counted(100, 50)))
    async with lab(main, dear, model=[table], keys_file=file) as node:
        assert (await asked(node, bearer(RED), model="a")).headers["x-ranvier-model"] == "dear"
        (scope,) = (await node.ask("/admin/access"))["limits"].values()
        used = {each["limit"]: (each["used"], each["reserved"]) for each in scope["limits"]}
        assert used == {"requests per minute": (1, 0), "tokens per minute": (150, 0)}


@pytest.mark.parametrize(
    ("named", "costs"), [({"model": "cheap"}, 150), ({"model": "dear"}, 400), ({"model": ""}, 400)]
)
async def test_who_names_no_model_pays_what_the_dearest_costs(
    tmp_path: Path, named: dict[str, str], costs: int
) -> None:
    """Engines serve such a request, too."""
    tenant = '[[tenant]]\nname = "gold"\nbudget = [{amount = 10000, window = "hour", unit = "cost"}]\n'
    file = keys_file(tmp_path, key_lines(RED, tenant="gold"), tenant)
    engine, tables = (
        Named("cheap", "dear", reply=answer(counted(100, 50))),
        [{"name": "dear", "cost": {"input": 2, "output": 4}}],
    )
    async with lab(engine, model=tables, keys_file=file) as node:
        assert (await asked(node, bearer(RED), max_tokens=20, **named)).status_code == 200
        (scope,) = (await node.ask("/admin/access"))["limits"].values()
        assert [each["used"] for each in scope["limits"]] == [costs]
