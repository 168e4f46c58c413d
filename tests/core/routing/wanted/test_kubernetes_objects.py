"""Slices, pods and pools of Kubernetes: which engines they name, and what else they have to be."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.routing.wanted.kubernetes_objects import (
    EngineEndpoint,
    PoolFacts,
    endpoints_of_pods,
    endpoints_of_slices,
    facts_of,
    pool_of,
)
from tests.examples import examples

HTTP = {"name": "http", "port": 8000, "protocol": "TCP"}
METRICS = {"name": "metrics", "port": 9000}


def slice_of(*endpoints: dict[str, Any], ports: Any = (HTTP,), kind: str = "IPv4", name: str = "s") -> dict[str, Any]:
    return {"metadata": {"name": name}, "addressType": kind, "ports": list(ports), "endpoints": list(endpoints)}


def endpoint(address: str, pod: str = "", **conditions: Any) -> dict[str, Any]:
    target = {"targetRef": {"kind": "Pod", "name": pod, "uid": f"uid-{pod}"}} if pod else {}
    return {"addresses": [address], "conditions": conditions, **target}


def pod(name: str = "p", address: str = "10.0.0.1", **parts: Any) -> dict[str, Any]:
    ports = [{"containerPort": number, "name": title} for title, number in parts.pop("ports", {"http": 8000}).items()]
    status = {"phase": "Running", "podIP": address, "conditions": [{"type": "Ready", "status": "True"}]}
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", **parts.pop("metadata", {})},
        "spec": {"containers": [{"ports": ports}, {}]},
        "status": {**status, **parts},
    }


def test_an_endpoint_is_ready_unless_it_is_called_not_ready_and_one_that_terminates_is_drained() -> None:
    found = endpoints_of_slices(
        [
            slice_of(
                endpoint("10.0.0.1", "a"),
                endpoint("10.0.0.2", "b", ready=None),
                endpoint("10.0.0.3", "c", ready=False),
                endpoint("10.0.0.4", "d", ready=False, serving=True, terminating=True),
                endpoint("10.0.0.5", "e", ready=False, serving=False, terminating=True),
            )
        ]
    ).found
    assert [(each.host, each.draining) for each in found] == [
        ("10.0.0.1", False),
        ("10.0.0.2", False),
        ("10.0.0.4", True),
        ("10.0.0.5", True),
    ]
    assert found[0] == EngineEndpoint("10.0.0.1", 8000, "a", "uid-a")


def test_all_slices_together_are_the_set_and_of_one_endpoint_in_two_the_one_that_does_not_end_counts() -> None:
    one, two = endpoint("10.0.0.1", "a", terminating=True), endpoint("10.0.0.1", "a", ready=True)
    for order in ((one, two), (two, one)):
        slices = [slice_of(order[0], name="s1"), slice_of(order[1], endpoint("10.0.0.2", "b"), name="s2")]
        found = endpoints_of_slices(slices).found
        assert sorted((each.host, each.draining) for each in found) == [("10.0.0.1", False), ("10.0.0.2", False)]


def test_of_a_pod_with_two_families_one_counts_and_the_other_if_it_is_asked_for() -> None:
    slices = [
        slice_of(endpoint("fd00::1", "a"), endpoint("fd00::2", "b"), kind="IPv6", name="s6"),
        slice_of(endpoint("10.0.0.1", "a"), name="s4"),
    ]
    assert sorted(each.host for each in endpoints_of_slices(slices).found) == ["10.0.0.1", "fd00::2"]
    assert sorted(each.host for each in endpoints_of_slices(slices, family=6).found) == ["fd00::1", "fd00::2"]
    bare = [slice_of(endpoint("fd00::1"), kind="IPv6"), slice_of(endpoint("10.0.0.1"))]
    assert [each.host for each in endpoints_of_slices(bare).found] == ["10.0.0.1"]


@pytest.mark.parametrize(
    ("ports", "wanted", "number", "why"),
    [
        ([HTTP], "", 8000, ""),
        ([HTTP, METRICS], "", 8000, ""),
        ([HTTP, METRICS], "metrics", 9000, ""),
        ([HTTP, METRICS], "9000", 9000, ""),
        ([{"name": "a", "port": 1}, METRICS], "", 0, "several ports"),
        ([HTTP], "grpc", 0, "no port named grpc"),
        ([HTTP], "1", 0, "no port 1"),
        ([{"name": "", "port": None}], "8000", 8000, ""),
        ([], "8000", 8000, ""),
        ([], "", 0, "no port"),
        ([{"name": "", "port": 5}], "", 5, ""),
        ([{"name": "u", "port": 5, "protocol": "UDP"}, HTTP], "", 8000, ""),
    ],
)
def test_a_port_is_named_by_name_or_number_or_is_the_only_one(
    ports: list[Any], wanted: str, number: int, why: str
) -> None:
    found = endpoints_of_slices([slice_of(endpoint("10.0.0.1"), ports=ports)], wanted)
    assert [each.port for each in found.found] == ([number] if number else [])
    assert why in "".join(found.left_out)


def test_a_pod_serves_while_it_is_ready_and_is_drained_from_its_deletion_on() -> None:
    pods = [
        pod("a"),
        pod("b", phase="Pending"),
        pod("c", conditions=[{"type": "Ready", "status": "False"}]),
        pod("d", metadata={"deletionTimestamp": "2026-11-29T00:00:00Z"}, conditions=[]),
        pod("e", ""),
        pod("f", "10.0.0.6", ports={}),
    ]
    found = endpoints_of_pods(pods)
    assert [(each.pod, each.draining) for each in found.found] == [("a", False), ("d", True)]
    assert found.left_out == ["pod f: it has no port: write its number"]


def test_a_pod_has_the_ports_of_its_annotation_or_those_that_are_asked_for() -> None:
    own = pod("a", metadata={"annotations": {"smg.ai/worker-ports": "30000, 30001"}})
    assert [each.port for each in endpoints_of_pods([own], ["http"]).found] == [30000, 30001]
    plain = pod("a", ports={"http": 8000, "grpc": 9000})
    assert [each.port for each in endpoints_of_pods([plain], ["grpc", "7000"]).found] == [9000, 7000]
    assert endpoints_of_pods([plain], ["odd"]).left_out == ["pod a: it has no port named odd"]
    both = pod("a", podIPs=[{"ip": "10.0.0.1"}, {"ip": "fd00::1"}])
    assert [each.host for each in endpoints_of_pods([both], family=6).found] == ["fd00::1"]


def test_annotations_and_labels_of_other_routers_are_understood_and_ours_are_options() -> None:
    marked = pod(
        metadata={
            "labels": {"model": "gemma", "llm-d.ai/role": "prefill-decode", "ranvier.io/weight": "1", "app": "x"},
            "annotations": {
                "ranvier.io/weight": "2",
                "ranvier.io/any-model": "true",
                "ranvier.io/scheme": "https",
                "ranvier.io/tls_name": "engine.test",
                "ranvier.io/priority": "5",
                "smg.ai/kv-connector": "nixl",
                "sglang.ai/bootstrap-port": "8998",
            },
        }
    )
    facts = facts_of(marked)
    assert facts.options == {"weight": "2", "any_model": "true", "scheme": "https", "tls_name": "engine.test"}
    assert dict(facts.about) == {
        "model": "gemma",
        "role": "prefill-decode",
        "kv_connector": "nixl",
        "bootstrap_port": "8998",
        "priority": "5",
    }
    assert facts.left_out == ""
    vllm = pod(metadata={"annotations": {"vllm.ai/bootstrap-port": "1"}, "labels": {"llm-d.ai/role": "prefill"}})
    assert dict(facts_of(vllm).about) == {"bootstrap_port": "1", "role": "prefill"}
    assert "prefill half" in facts_of(vllm).left_out


def test_a_pool_chooses_by_labels_and_ports_in_both_versions() -> None:
    labels = {"app": "vllm", "a.b/tier": "gpu"}
    facts = PoolFacts("a.b/tier=gpu,app=vllm", ("8000", "8001"))
    assert (
        pool_of({"spec": {"selector": {"matchLabels": labels}, "targetPorts": [{"number": 8000}, {"number": 8001}]}})
        == facts
    )
    assert pool_of({"spec": {"selector": labels, "targetPortNumber": 8000}}) == facts._replace(ports=("8000",))
    assert "h2c" in str(pool_of({"spec": {"selector": labels, "targetPortNumber": 1, "appProtocol": "h2c"}}))
    for spec in ({}, {"selector": labels}, {"selector": {"a": 1}, "targetPortNumber": 1}):
        assert "no selector" in str(pool_of({"spec": spec}))


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.sampled_from(["Running", "10.0.0.1", "IPv4"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "metadata",
                    "spec",
                    "status",
                    "name",
                    "ports",
                    "port",
                    "endpoints",
                    "addresses",
                    "conditions",
                    "targetRef",
                    "addressType",
                    "containers",
                    "containerPort",
                    "podIP",
                    "podIPs",
                    "ip",
                    "phase",
                    "labels",
                    "annotations",
                    "selector",
                    "targetPorts",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@settings(max_examples=examples(300), deadline=None)
@given(ODD)
def test_whatever_an_object_is_nothing_is_raised(item: object) -> None:
    endpoints_of_slices([item])
    endpoints_of_pods([item])
    pool_of(item)
    facts_of(item)
