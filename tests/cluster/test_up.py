"""`up` with stub children: real processes, real signals, a stub in place of engines and nodes."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio
from rich.console import Console

from cluster.demo import up
from cluster.demo.demo_plan import Lab, Settings, at, node_commands, plan, write_key
from cluster.demo.demo_view import Column, client_help, live_table, plain_line, summary
from cluster.dns.addresses import Address
from cluster.engine import engine_process as engine
from cluster.load.answer import Failure
from cluster.load.load_report import Sample
from cluster.processes.children import ChildDied, ChildNotReady, Command, start, stop, wait_ready, watch
from cluster.processes.commands import EnginePlace, engine_command
from ranvier_py.cli import make_parser as node_parser

DEADLINE_S = 60

STUB = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

host, port, name, die_at = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
asked = 0

class Stub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_): pass
    def do_GET(self): self.reply(b"{}")
    def reply(self, body, kind="application/json"):
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.send_header("x-engine", "engine-1")
        self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        global asked
        sent = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/admin/clear":
            print("cleared", flush=True)
            return self.reply(b"{}")
        asked += 1
        if asked == die_at:
            print("out of memory", flush=True)
            import os; os._exit(9)
        cached = 90 if name.startswith("affinity") else 40
        usage = {"prompt_tokens": 100, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": cached}}
        if not json.loads(sent)["stream"]:
            whole = {"choices": [{"message": {"content": "hi"}}], "usage": usage}
            return self.reply(json.dumps(whole).encode())
        chunks = [{"choices": [{"delta": {"content": "hi"}}]}, {"choices": [], "usage": usage}]
        body = "".join(f"data: {json.dumps(chunk)}\\n\\n" for chunk in chunks) + "data: [DONE]\\n\\n"
        self.reply(body.encode(), "text/event-stream")

class Server(ThreadingHTTPServer):
    request_queue_size = 128

print("listening", flush=True)
Server((host, port), Stub).serve_forever()
"""


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    path = tmp_path / "stub.py"
    path.write_text(STUB)
    return path


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    path = tmp_path / "logs"
    path.mkdir()
    return path


def stub_command(path: Path, host: str, port: int, name: str, die_at: int = 0) -> Command:
    return Command(name, (sys.executable, str(path), host, str(port), name, str(die_at)), host, port, "/readyz")


def stub_nodes(path: Path, die_at: int, lab: Lab, policy: str, *_: object) -> list[Command]:
    places = enumerate(lab.nodes[policy], 1)
    return [stub_command(path, place.ip, place.port, f"{policy}-node-{number}", die_at) for number, place in places]


MakeStage = Callable[..., up.Stage]


@pytest.fixture
def make_stage(stub: Path, logs: Path, monkeypatch: pytest.MonkeyPatch) -> MakeStage:
    """A lab with stubs for children."""

    def engine_of(_settings: Settings, place: EnginePlace) -> Command:
        return stub_command(stub, place.ip, place.port, place.name)

    def make(*, once: bool = True, die_at: int = 0) -> up.Stage:
        monkeypatch.setattr(up, "engine_command", engine_of)
        monkeypatch.setattr(up, "node_commands", partial(stub_nodes, stub, die_at))
        settings = Settings(nodes=2, engines=1, users=8, turns=1, think_s=0)
        return up.Stage(settings, plan(settings, Random()), logs, Console(file=io.StringIO(), width=160), once)

    return make


def printed(stage: up.Stage) -> str:
    assert isinstance(stage.console.file, io.StringIO)
    return stage.console.file.getvalue()


async def test_the_same_chats_run_under_both_policies_and_then_it_ends(make_stage: MakeStage, logs: Path) -> None:
    """Exit code 0, caches cleared before each policy, both figures in the last sentence, and no child left."""
    stage = make_stage()
    with trio.fail_after(DEADLINE_S):
        code = await up.run(stage)
    assert code == up.OK, printed(stage)
    assert [column.log.ok for column in stage.columns] == [88, 88]
    assert [share.requests for share in stage.columns[1].outcome(0.0).nodes] == [44, 44], "by turns, as DNS says"
    assert (logs / "engine-1.log").read_text().count("cleared") == 2
    assert "prefill saved: 40.0% (round_robin) vs 90.0% (affinity)" in printed(stage)
    assert len(stage.children) == 5
    assert all(child.process.poll() is not None for child in stage.children)


async def test_a_child_that_dies_is_reported_with_its_last_words(make_stage: MakeStage, logs: Path) -> None:
    stage = make_stage(die_at=5)
    with trio.fail_after(DEADLINE_S):
        code = await up.run(stage)
    assert code == up.FAILED
    assert "ended with exit code 9" in printed(stage)
    assert "out of memory" in printed(stage)
    assert all(child.process.poll() is not None for child in stage.children)


async def test_it_stays_up_until_a_signal_and_states_where(make_stage: MakeStage, logs: Path) -> None:
    """Ctrl-C after the replay is the ordinary end: exit code 0."""
    stage = make_stage(once=False)
    codes: list[int] = []

    async def run() -> None:
        codes.append(await up.run(stage))

    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await stage.replayed.wait()
            node = stage.children[-1].command
            status, _ = await up.fetch(node.ready_host, node.ready_port, "/readyz")
            assert status == 200
            os.kill(os.getpid(), signal.SIGTERM)
    assert codes == [up.OK]
    assert f"http://{stage.lab.nodes['affinity'][0].ip}:" in printed(stage)
    assert all(child.process.poll() is not None for child in stage.children)


async def test_an_interrupted_replay_is_not_a_success(
    make_stage: MakeStage, stub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = make_stage()

    def interrupt(*rest: Any) -> list[Command]:
        os.kill(os.getpid(), signal.SIGINT)
        return stub_nodes(stub, 0, *rest)

    monkeypatch.setattr(up, "node_commands", interrupt)
    with trio.fail_after(DEADLINE_S):
        code = await up.run(stage)
    assert code == up.INTERRUPTED
    assert stage.children
    assert all(child.process.poll() is not None for child in stage.children)


@pytest.mark.skipif(sys.platform != "linux", reason="only the Linux kernel can promise this")
async def test_no_child_outlives_a_parent_that_is_killed_outright(stub: Path, logs: Path, tmp_path: Path) -> None:
    """Not even SIGKILL of the lab leaves engines behind."""
    driver = tmp_path / "driver.py"
    command = stub_command(stub, "127.0.0.1", plan(Settings(), Random()).engines[0].port, "engine-1")
    driver.write_text(
        f"import sys, time; sys.path.insert(0, {str(up.Path(up.__file__).parents[2])!r})\n"
        "from pathlib import Path, PosixPath\n"
        "from cluster.processes.children import Command, start\n"
        f"child = start({command!r}, Path({str(logs)!r}))\n"
        "print(child.process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with trio.fail_after(DEADLINE_S):
        parent = await trio.lowlevel.open_process([sys.executable, str(driver)], stdout=-1)
        assert parent.stdout is not None
        pid = int(await parent.stdout.receive_some())
        fd = os.pidfd_open(pid)
        try:
            parent.kill()
            await trio.lowlevel.wait_readable(fd)  # the process has ended
        finally:
            os.close(fd)
            await parent.wait()


async def test_a_child_that_never_gets_ready_is_named(logs: Path) -> None:
    command = Command("sleeper", (sys.executable, "-c", "import time; time.sleep(600)"), "127.0.0.1", 1, "/readyz")
    child = start(command, logs)
    with pytest.raises(ChildNotReady, match=r"sleeper was not ready after 0\.2 s \(connect: connection refused\)"):
        await wait_ready(child, 0.2)
    await stop([child])


async def test_a_child_that_ignores_the_polite_signal_is_ended_by_force(stub: Path, logs: Path) -> None:
    deaf = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); exec(open({str(stub)!r}).read())"
    port = plan(Settings(), Random()).engines[0].port
    command = Command("deaf", (sys.executable, "-c", deaf, "127.0.0.1", str(port), "deaf", "0"), "127.0.0.1", port, "/")
    child = start(command, logs)
    with trio.fail_after(DEADLINE_S):
        await wait_ready(child, DEADLINE_S)
        await stop([child], grace_s=0.1)
    assert child.process.poll() == -signal.SIGKILL


def test_settings_of_somebodys_real_nodes_do_not_reach_the_lab(monkeypatch: pytest.MonkeyPatch, logs: Path) -> None:
    monkeypatch.setenv("RANVIER_BACKEND", "http://10.0.0.1:8000")
    code = "import os; print(os.environ.get('RANVIER_BACKEND'), os.environ['PYTHONUNBUFFERED'])"
    child = start(Command("env", (sys.executable, "-c", code), "127.0.0.1", 1, "/"), logs)
    assert child.process.wait(DEADLINE_S) == 0
    assert child.log.read_text() == "None 1\n"


def test_everything_has_a_port_of_its_own_below_the_ephemeral_ones() -> None:
    lab = plan(Settings(nodes=3, engines=4), Random(1))
    ports = [engine.port for engine in lab.engines]
    ports += [nodes[0].port for nodes in lab.nodes.values()]
    ports += [places[0].port for places in lab.gossips.values()]
    ports += [port for controls in lab.controls.values() for port in controls]
    assert len(set(ports)) == len(ports) == 4 + 2 + 2 + 6
    assert max(ports) < 32768


def test_a_node_is_started_as_anybody_would_start_it() -> None:
    lab = plan(Settings(nodes=1, engines=2), Random(1))
    (command,) = node_commands(lab, "affinity")
    control = lab.controls["affinity"][0]
    assert command.argv[1:] == (
        *("-m", "ranvier_py", "serve", "--listen", at(lab.nodes["affinity"][0]), "--control", f"127.0.0.1:{control}"),
        *(word for engine in lab.engines for word in ("--backend", engine.url)),
        *("--policy", "affinity", "--debug-headers"),
    )
    assert (command.ready_port, command.ready_path) == (control, "/readyz")


def test_nodes_of_a_policy_are_peers_of_each_other_where_they_have_a_key() -> None:
    """Two nodes and a key that both have; nothing that a node does not know."""
    lab = plan(Settings(nodes=2, engines=1), Random(1))
    commands = node_commands(lab, "affinity", key_file=Path("key"))
    words = [[word for word in command.argv if word != "--debug-headers"] for command in commands]
    flags = [dict(options_of(each[4:])) for each in words]
    options, unknown = node_parser("serve").parse_known_args(words[0][3:])
    assert unknown == []
    assert flags[0]["--gossip"] != flags[1]["--gossip"]
    assert options.join == [flag["--gossip"] for flag in flags]
    assert flags[0]["--cluster-key-file"] == flags[1]["--cluster-key-file"]
    assert not [word for command in node_commands(lab, "affinity") for word in command.argv if "gossip" in word]


def test_the_cluster_key_is_a_secret_of_its_own(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_key(tmp_path / name)
    keys = [(tmp_path / name).read_text().strip() for name in ("a", "b")]
    assert keys[0] != keys[1]
    assert [len(bytes.fromhex(key)) for key in keys] == [32, 32]
    assert (tmp_path / "a").stat().st_mode & 0o077 == 0


def options_of(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    words = iter(argv)
    return ((word, next(words)) for word in words if word.startswith("--"))


def test_the_engines_flags_are_the_ones_the_engine_knows() -> None:
    argv = engine_command(Settings(tokenizer="bytes"), EnginePlace("engine-1", 20001)).argv[4:]
    arguments = engine.parser().parse_args(argv)
    assert dict(options_of(argv))["--name"] == arguments.name == "engine-1"
    assert arguments.cache_tokens == Settings().cache_tokens


@pytest.mark.parametrize("wrong", [{"nodes": 0}, {"engines": 99}, {"turns": 0}, {"think_s": -1.0}, {"policies": ()}])
def test_senseless_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"want|must"):
        Settings(**wrong)


def test_flags_become_settings() -> None:
    options = up.make_parser().parse_args(["--nodes", "2", "--think-s", "0.5", "--policies", "random,affinity"])
    settings = up.make_settings(options)
    assert (settings.nodes, settings.think_s, settings.policies) == (2, 0.5, ("random", "affinity"))
    assert settings.gossip
    assert not up.make_settings(up.make_parser().parse_args(["--no-gossip"])).gossip
    assert up.main(["--nodes", "0"]) == up.MISUSED


def measured(policy: str, cached: int) -> Column:
    column = Column(policy, 4, "done", began_s=0.0, ended_s=2.0)
    for name in ("engine-1", "engine-1", "engine-2"):
        column.log.sent += 1
        column.log.good(Sample(name, "n", 1.0, 0.25, 100, cached, 5))
    column.log.sent += 1
    column.log.bad(Failure("HTTP 500"), "n")
    return column


def test_the_table_shows_both_policies_side_by_side() -> None:
    columns = [measured("round_robin", 20), measured("affinity", 80)]
    console = Console(file=io.StringIO(), width=120)
    console.print(live_table(columns, ["engine-1", "engine-2", "engine-3"], [Address("127.0.0.2", 8080)], 9.0))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    lines = {line.split("│")[1].strip(): line for line in text.splitlines() if line.count("│") > 2}
    assert "20.0%" in lines["hit rate by the engines"]
    assert "80.0%" in lines["hit rate by the engines"]
    assert "240" in lines["prefill saved"]
    assert "250 ms" in lines["time to first token p95"]
    assert "67%" in lines["engine-1"]
    assert "127.0.0.2:8080" in text


def test_words_for_a_log_and_for_the_next_client() -> None:
    column = measured("affinity", 80)
    assert "3 of 4 ok, 1 failed, hit rate 80.0%, TTFT p50 250 ms" in plain_line(column, 9.0)
    assert summary([("affinity", column.outcome(9.0))]).startswith("prefill saved: 80.0% (affinity)")
    words = client_help(Address("127.0.0.2", 8080), "lab-model", "router.lab", ("127.0.0.1", 20053))
    assert "http://127.0.0.2:8080/v1/chat/completions" in words
    assert "dig @127.0.0.1 -p 20053 router.lab +short" in words


async def test_only_an_end_that_nobody_asked_for_is_a_death(logs: Path) -> None:
    asked = start(Command("sleeper", (sys.executable, "-c", "import time; time.sleep(600)"), "127.0.0.1", 1, "/"), logs)
    hasty = (sys.executable, "-c", "print('bye'); raise SystemExit(3)")
    with trio.fail_after(DEADLINE_S):
        await stop([asked])
        await watch(asked)
        with pytest.raises(ChildDied, match=r"exit code 3.*\nbye"):
            await watch(start(Command("hasty", hasty, "127.0.0.1", 1, "/"), logs))
