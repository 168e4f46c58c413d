"""Each command imports what it needs and no more: `--help` answers at once, and no node loads the replay. What `--help`
and `ranvier config` say of one option can be read without the others."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ranvier_py.cli import COMMANDS, main
from ranvier_py.config.config_model import KEYS
from ranvier_py.config.config_reference import help_of
from tests import house

ROOT = Path(__file__).parents[1]

PROGRAM = """
import sys, trio
sys.argv[0] = "ranvier"
trio.run = lambda *_, **__: None  # nothing serves, but all is imported that would
if "serve" in sys.argv and "--help" not in sys.argv:
    import ranvier_py.node.node, ranvier_py.control.control_port  # as soon as it runs
from ranvier_py.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print("\\n", *[name for name in sys.modules if name.startswith("ranvier_py.")])
"""


def loaded_by(*words: str, program: str = PROGRAM) -> list[str]:
    """The modules of the package that `ranvier` with these words loads."""
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.splitlines()[-1].split()


@pytest.mark.parametrize("words", ["--help", "version", "version --help"])
def test_help_and_version_load_only_the_command_line(words: str) -> None:
    loaded = {house.package_of(name) for name in loaded_by(*words.split())}
    assert loaded <= {"core", "commands", "cli"}
    assert len(loaded_by(*words.split())) < 10


def test_a_node_loads_no_replay_and_no_reporter() -> None:
    loaded = loaded_by("serve")
    assert "ranvier_py.node.node" in loaded
    assert [name for name in loaded if house.package_of(name) in ("replay", "reporter")] == []


STARTING = """
import gc, os, sys
from ranvier_py.io import logs
from ranvier_py.io.tokenizer_process import TokenizerProcess

begin, start = TokenizerProcess.begin, TokenizerProcess.start

def show():
    print("\\n", gc.get_stats()[2]["collections"], gc.get_freeze_count(), *sys.modules, flush=True)

async def begun(self):
    await begin(self)
    show()

async def waiting(self):
    show()
    await start(self)

def ready(text):
    show()
    os._exit(0)

TokenizerProcess.begin, TokenizerProcess.start, logs.announce = begun, waiting, ready
from ranvier_py.cli import main
main(["serve", "--listen", "127.0.0.1:0", "--control", "127.0.0.1:0", *sys.argv[1:]])
"""
FEW_NEED = (
    *("redis", "transformers", "huggingface_hub", "tokenizers", "dns", "torch", "opentelemetry", "yaml", "zmq"),
    *("httpx", "rich", "pygments"),
    *("ranvier_py.config.continuum_file", "ranvier_py.config.yaml_file", "ranvier_py.config.backend_files"),
    *(
        "ranvier_py.io.sources",
        "ranvier_py.io.engine_events.sse_source",
        "ranvier_py.io.tracing",
        "ranvier_py.io.redis_pool",
        "ranvier_py.node.tracing",
    ),
    *(f"ranvier_py.node.discovery.{kind}_source" for kind in ("dns", "file", "kubernetes")),
    *("ranvier_py.node.config_check", "ranvier_py.node.checks.source_checks", "ranvier_py.replay"),
)
"""What is imported where it is configured, or by other commands."""

MODULES_MAX = 1295  # a third of them ours, and what the environment of tests adds: each costs a millisecond of a core
EXEMPT_MIN = 30_000  # objects of modules: of the command line, then of the parts


def test_a_node_loads_its_parts_while_its_tokenizer_process_does_and_no_library_that_few_need() -> None:
    """Until it is ready; processor time is what modules cost, and no test can count on that."""
    done = subprocess.run([sys.executable, "-c", STARTING], capture_output=True, text=True, check=True, cwd=ROOT)
    began, waited, ready = (line.split() for line in done.stdout.splitlines() if len(line) > 1000)
    assert waited[0] == began[0], "modules were looked through for garbage"
    assert EXEMPT_MIN < int(began[1]) < int(waited[1]) - EXEMPT_MIN, "modules would be looked through"
    assert [name for name in ready for unneeded in FEW_NEED if house.is_in(name, unneeded)] == []
    assert len(ready[2:]) <= MODULES_MAX
    later = [name for name in began if name.partition(".")[0] in ("quart", "hypercorn", "flask", "jinja2")]
    assert later == []
    parts = ("node.node", "node.cluster_parts", "node.part", "core.peer.router_peer", "control.control_port")
    assert {f"ranvier_py.{name}" for name in parts} & {*began} == set()
    assert {*ready[2:]} - {*waited} <= {"encodings.idna", "stringprep"}  # of names


CHILD = """
import sys
from ranvier_py.node.tokenizer_child import TokenizerChild
print("\\n", *sys.modules)
"""


def test_a_tokenizer_process_loads_nothing_of_a_node() -> None:
    loaded = {".".join(name.split(".")[:3]) for name in loaded_by(program=CHILD)}
    assert "ranvier_py.io.tokenizer" in loaded
    assert loaded & {"trio", "pydantic", "ranvier_py.config", "ranvier_py.proxy", "ranvier_py.core.routing"} == set()


@pytest.mark.parametrize(
    ("words", "unneeded"),
    [
        ("serve --help", ["ranvier_py.node", "ranvier_py.control", "ranvier_py.replay", "ranvier_py.core.peer"]),
        ("config --check", ["ranvier_py.replay", "ranvier_py.control"]),
        ("explain none", ["ranvier_py.core.routing", "ranvier_py.proxy", "ranvier_py.node", "ranvier_py.replay"]),
        ("status --help", ["ranvier_py.core.routing", "ranvier_py.proxy", "ranvier_py.node", "ranvier_py.replay"]),
        ("clients --help", ["ranvier_py.core.routing", "ranvier_py.proxy", "ranvier_py.node"]),
        ("lint none", ["ranvier_py.proxy", "ranvier_py.node", "ranvier_py.io"]),
        ("replay none", ["ranvier_py.proxy", "ranvier_py.node", "ranvier_py.config", "ranvier_py.control"]),
        ("reporter", ["ranvier_py.proxy", "ranvier_py.node", "ranvier_py.replay", "ranvier_py.control"]),
    ],
)
def test_a_command_loads_nothing_that_only_others_need(words: str, unneeded: list[str]) -> None:
    loaded = loaded_by(*words.split())
    assert [name for name in loaded if any(house.is_in(name, package) for package in unneeded)] == []


def test_the_replay_is_loaded_by_the_commands_that_are_about_it_alone() -> None:
    importers = {
        house.package_of(module)
        for module, path in house.modules().items()
        for _, imported in house.imports_of(path)
        if house.package_of(imported) == "replay" != house.package_of(module)
    }
    assert importers == {"commands.run_clients", "commands.run_lint", "commands.run_replay"}


def test_the_help_of_each_option_can_be_read_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody reads 120 options in their order."""
    assert [
        (name, text) for name, key in KEYS.items() if house.leans(text := help_of(key)) or text.count(" ") < 3
    ] == []
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert re.findall(r"  \.\.\. .*", capsys.readouterr().out) == []
