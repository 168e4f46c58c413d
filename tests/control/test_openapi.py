"""The document of the control port: made of what the parts declare, and true of a live node."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio
from jsonschema import Draft202012Validator

from ranvier_py.control.control_port import OPEN_PATHS, ControlPort, role_for
from ranvier_py.control.openapi import document
from ranvier_py.node.reload import Reloads
from tests.builders.built_nodes import built
from tests.node.node_lab import Lab, lab, opened

CASES = 12  # of each operation
CHECKS = "content_type_conformance,status_code_conformance,response_schema_conformance"
"""A 500 is a status that the document does not have."""
PHASES = "examples,coverage,fuzzing"


async def test_each_route_of_each_part_is_in_the_document_once_with_the_role_that_it_needs() -> None:
    node = built(more=lambda node: [ControlPort(node), Reloads(node, node.config, None, 0)])
    found = document(node, role_for, OPEN_PATHS)
    operations = {
        (method.upper(), re.sub(r"\{(\w+)\}", r"<\1>", path)): operation
        for path, operations in found["paths"].items()
        for method, operation in operations.items()
    }
    declared = {tuple(route.split(" ")) for part in node.parts for route in part.routes()}
    assert set(operations) == declared
    assert len({each["operationId"] for each in operations.values()}) == len(operations)
    for (method, path), operation in operations.items():
        assert operation["summary"]
        assert operation.get("x-role", "open") == ("open" if path in OPEN_PATHS else role_for(method, path))
        for schema in schemas(operation):
            Draft202012Validator.check_schema(schema)


def schemas(operation: dict[str, Any]) -> list[Any]:
    bodies = [operation["requestBody"]] if "requestBody" in operation else []
    contents = [each["content"] for each in (*bodies, *operation["responses"].values())]
    found = [kind["schema"] for content in contents for kind in content.values() if "schema" in kind]
    return found + [each["schema"] for each in operation.get("parameters", [])]


async def test_a_live_node_serves_it_and_its_errors_are_as_it_has_them() -> None:
    async with lab() as node:
        found = await node.ask("/openapi.json")
        assert found["openapi"] == "3.1.0"
        error = Draft202012Validator(found["components"]["schemas"]["Error"])
        for path, operations in found["paths"].items():
            for method, operation in operations.items():
                url = f"{node.control}{path.replace('{fingerprint}', '1')}"
                url += "?seconds=1" if path.endswith("/stream") else ""  # else it does not end
                answer = await node.http.request(method, url)
                kind = answer.headers["content-type"].partition(";")[0]
                if answer.status_code == 200:
                    kinds = operation["responses"]["200"]["content"]
                    assert kind in [each.partition(";")[0] for each in kinds], (method, path)
                else:
                    assert answer.status_code < 500, (method, path)
                    error.validate(answer.json())


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="schemathesis is not installed")
async def test_a_live_node_keeps_to_it_whatever_is_asked(tmp_path: Path) -> None:
    async with opened(Lab, 1, 300) as place:
        node = await place.start()
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{node.control}/openapi.json", "--no-color"]
        command += [
            "--checks",
            CHECKS,
            "--max-examples",
            str(CASES),
            "--phases",
            "examples,coverage,fuzzing",
            "--exclude-path",
            "/admin/page/stream",  # it does not end
            "--seed",
            "1",
        ]
        silent: Any = {"capture_stdout": True, "stderr": subprocess.STDOUT, "check": False}
        done = await trio.run_process(command, cwd=tmp_path, **silent)  # it leaves a folder there
        assert done.returncode == 0, done.stdout.decode()[-6000:]
        assert await node.faults() == {}
