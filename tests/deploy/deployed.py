"""What the tests of deploy/ have in common: its files as they are read, and what a node needs of memory and of time."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from ranvier_py.config.config_model import Config
from ranvier_py.core.mesh.mesh_values import FRAME_BYTES_MAX
from ranvier_py.core.mesh.port_traffic import PortOptions
from tests.house import ROOT

Object = dict[str, Any]

DEPLOY = ROOT / "deploy"

END_MARGIN_S = 10
"""Between the drain deadline and SIGKILL: the goodbye, closing what is left, writing the state, a slow machine."""

STRANGERS_BYTES = PortOptions().streams_in * FRAME_BYTES_MAX + PortOptions().queued_bytes
ROUTE_BYTES, CONVERSATION_BYTES = 250, 2048
PROGRAM_BYTES = 256 * 1024**2
"""What a node holds when it has seen much: by the key's own help, and with a large tokenizer's program."""


def loaded(text: str | Path) -> list[Any]:
    """The documents of a text or file. A key that is written twice is an error, as it is to Kubernetes."""
    return [each for each in YAML(typ="safe", pure=True).load_all(text) if each is not None]


def dockerfile(instruction: str) -> list[str]:
    """What follows the instruction, once for each time it is there."""
    return re.findall(rf"^{instruction} (.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)


def most_bytes(config: Config) -> int:
    """What a node may come to hold."""
    routes, prompts = config.route_capacity * ROUTE_BYTES, config.prompt_memory_entries * CONVERSATION_BYTES
    return PROGRAM_BYTES + routes + prompts + config.server.in_flight_bytes_max + STRANGERS_BYTES
