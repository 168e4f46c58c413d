"""A real tokenizer process that is killed, stopped, talks nonsense, and starts anew; and the node beside it."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from math import inf
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import pytest
import trio
from trio import from_thread

from ranvier_py.core.errors import ConfigError, TokenizerLost
from ranvier_py.core.prompts.fingerprint import TokenHasher
from ranvier_py.core.tokenize.tokenize_frames import Reply, Setup, encode_setup
from ranvier_py.core.tokenize.tokenize_job import Status, TokenizeJob
from ranvier_py.core.tokenize.tokenize_service import TokenizeService
from ranvier_py.io import tokenizer_process
from ranvier_py.io.tokenizer import EMBEDDED, ChatTokenizer
from ranvier_py.io.tokenizer_process import COMMAND, FIRST_SOCKETS, TokenizerProcess
from tests.examples import some
from tests.waiting import until

KEY = b"k" * 32
SETUP = Setup(str(EMBEDDED), "", KEY, 16, 3)
DEADLINE_S = 60.0
"""A process that loads transformers on a busy machine takes a while; each test ends long before."""


def job(text: str, known: int = 0) -> TokenizeJob:
    root = TokenHasher(KEY).start(7)  # type: ignore[arg-type]
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    return TokenizeJob("chat", len(text) // 4, known, root, root.total, b"", body)


def script(path: Path, *lines: str) -> list[str]:
    """A process that does something else than it should."""
    sockets = "socks = [socket.socket(fileno=int(number)) for number in sys.argv[1:]]"
    path.write_text("\n".join(("import os, socket, sys, time", sockets, *lines)))
    return [sys.executable, str(path)]


GOOD_FACTS = (
    "from ranvier_py.core.tokenize.tokenize_frames import encode_start",
    "from ranvier_py.core.tokenize.tokenize_job import TokenizerFacts",
    "socks[0].recv(65536)",
    "socks[0].sendall(encode_start(TokenizerFacts('same', True, True, 4.0), []))",
)


@asynccontextmanager
async def running(
    setup: Setup = SETUP, command: Sequence[str] = COMMAND, deadline_s: float = DEADLINE_S
) -> AsyncIterator[TokenizerProcess]:
    process = TokenizerProcess(setup, command, restart_delay_s=0.01)
    with trio.fail_after(deadline_s):
        await process.start()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(process.run)
                yield process
                nursery.cancel_scope.cancel()
        finally:
            await process.close()


class Shared(NamedTuple):
    process: TokenizerProcess
    ask: Callable[..., Reply]  # and wait


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    """One process in a loop of its own, for tests that leave it as it was: loading takes a second of a core."""
    begun: SimpleQueue[Any] = SimpleQueue()

    async def serve() -> None:
        with trio.move_on_after(DEADLINE_S) as starting:  # else the thread, which is waited for, would never end
            async with running(command=("nice", "-n", "15", *COMMAND), deadline_s=inf) as process:
                starting.deadline = inf
                begun.put((process, trio.lowlevel.current_trio_token(), end := trio.Event()))
                await end.wait()

    with ThreadPoolExecutor(1) as threads:
        threads.submit(trio.run, serve)
        process, token, end = begun.get(timeout=DEADLINE_S)
        yield Shared(process, lambda *of, **how: from_thread.run(partial(process.ask, *of, **how), trio_token=token))
        from_thread.run_sync(end.set, trio_token=token)


def is_gone(pid: int) -> bool:
    """Also a process that nobody has waited for is."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_what_the_process_answers_is_what_the_tokenizer_makes_of_it_here(shared: Shared) -> None:
    jobs = [job("hello there " * 40), job("{{ 7 }} " * 9)]
    own = ChatTokenizer.load("embedded")
    found = shared.ask(jobs, first=False)
    assert shared.process.facts == own.facts
    assert [each.read() for each in found.results] == TokenizeService(own, TokenHasher(KEY, short=3)).results(jobs)
    assert found.results[0].status is Status.DONE
    assert found.busy_s > 0


def test_a_prompt_that_was_taken_for_shorter_than_what_is_known_of_it_is_tokenized_like_any(shared: Shared) -> None:
    short = job("hello there " * 40)
    over = short._replace(length=10, state=short.state._replace(tokens=4_000_000))
    assert len(shared.ask([over] * 3, first=False).results) == 3
    assert shared.process.counters.killed == 0


def test_prefix_hashes_are_noted_where_they_are_wanted(shared: Shared) -> None:
    assert shared.ask([job("hello there " * 40)], first=True).keyed == []
    (keyed,) = shared.ask([job("hello there " * 40)], [64], first=True).keyed
    assert (keyed.tokens, keyed.root) == (64, job("").root)


async def test_a_prompt_that_waits_is_not_behind_what_is_learned() -> None:
    async with running() as process, trio.open_nursery() as nursery:
        long = job("all of Shakespeare, and more of it. " * 20_000)
        learned = trio.Event()

        async def learn() -> None:
            await process.ask([long] * 4, first=False)
            learned.set()

        nursery.start_soon(learn)
        for _ in range(3):
            await process.ask([job("short")], first=True)
        assert not learned.is_set()
        nursery.cancel_scope.cancel()


async def test_a_process_that_is_killed_in_the_middle_costs_its_jobs_and_is_replaced() -> None:
    async with running() as process, trio.open_nursery() as nursery:
        pid, refused = process.pid, []

        async def ask(first: bool) -> None:
            try:
                await process.ask([job("all of Shakespeare, and more of it. " * 20_000)] * 4, first=first)
            except TokenizerLost as error:
                refused.append(error)

        for first in (True, True, False):
            nursery.start_soon(ask, first)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: len(refused) == 3)
        await process.ready()
        assert process.pid != pid
        for first in (True, False):
            assert (await process.ask([job("hello")], first=first)).results[0].status is Status.DONE
        assert (process.counters.restarts, process.counters.killed) == (1, 0)


async def test_a_process_that_hangs_is_killed_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_process, "BATCH_LIMIT_S", 0.05)
    async with running(command=script(tmp_path / "good.py", *GOOD_FACTS, "time.sleep(60)")) as process:
        pid = process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(TokenizerLost):
            await process.ask([job("hello")], first=True)
        with pytest.raises(TokenizerLost):
            await process.ask([job("hello")], first=True)  # at once: there is none just now
        await process.ready()
        assert is_gone(pid)
        assert process.counters.killed == 1


@pytest.mark.parametrize(
    "answer",
    some(["b''", "b'\\xff' * 4", "b'\\x04\\0\\0\\0junk'", "b'\\x04\\0\\0\\0\\x93\\x01\\x90\\x90'"], kept=3),
)
async def test_a_process_that_answers_with_anything_but_results_is_killed_and_replaced(
    answer: str, tmp_path: Path
) -> None:
    lines = ("socks[1].recv(65536)", f"socks[1].sendall({answer})", "socks[1].close()", "time.sleep(60)")
    command = script(tmp_path / "odd.py", *GOOD_FACTS, *lines)
    async with running(command=command) as process:
        pid = process.pid
        with pytest.raises(TokenizerLost):
            await process.ask([job("hello")], first=True)
        await process.ready()
        assert process.pid != pid
        assert process.counters.restarts == 1


async def test_a_process_with_another_tokenizer_than_before_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen = tmp_path / "seen"
    other = [line.replace("'same'", "'other' if os.path.exists(seen) else 'same'") for line in GOOD_FACTS]
    command = script(tmp_path / "odd.py", f"seen = {str(seen)!r}", *other, "open(seen, 'w')", "socks[0].recv(1)")
    async with running(command=command) as process:
        assert process.pid is not None
        await until(seen.exists)
        os.kill(process.pid, signal.SIGKILL)
        await until(lambda: "tokenizer.changed" in caplog.text)
        with pytest.raises(TokenizerLost):
            await process.ask([job("hello")], first=True)
        assert process.counters.up == 0


async def test_tries_to_start_it_anew_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    count = (
        f"starts = {str(tmp_path / 'starts')!r}",
        "open(starts, 'a').write('x')",
        "number = os.path.getsize(starts)",
    )
    command = script(tmp_path / "odd.py", *count, "number in (2, 3) and sys.exit(3)", *GOOD_FACTS, "socks[0].recv(1)")
    async with running(command=command) as process:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        await until(lambda: process.counters.restarts)
    assert caplog.text.count("tokenizer.not_restarted") == 2


async def test_what_is_wrong_at_the_start_is_the_configurations_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    process = TokenizerProcess(SETUP._replace(source="/nowhere/at/all"))
    with trio.fail_after(DEADLINE_S), pytest.raises(ConfigError, match="tokenizer: '/nowhere/at/all' can't be loaded"):
        await process.start()


def test_who_learns_runs_only_where_nobody_else_wants_the_processor(shared: Shared) -> None:
    """In a node that is nice itself, too. Who tokenizes a prompt that waits to be placed does not give way."""
    assert len(shared.ask([job("hello there")], first=False).results) == 1
    threads = list(Path(f"/proc/{shared.process.pid}/task").iterdir())
    assert len(threads) >= 2
    assert {os.sched_getscheduler(int(thread.name)) for thread in threads} == {os.SCHED_OTHER}
    [learner] = forks_of(shared.process.pid)
    assert os.sched_getscheduler(learner) == os.SCHED_IDLE, "a process of its own: no lock of its keeps others waiting"
    assert shared.process.counters.restarts == 0


@pytest.mark.parametrize("lost", ["who tokenizes", "who learns"])
async def test_who_learns_and_who_tokenizes_end_together_and_are_replaced(lost: str) -> None:
    async with running() as process:
        [learner], tokenizer = forks_of(process.pid), process.pid or 0
        os.kill(learner if lost == "who learns" else tokenizer, signal.SIGKILL)
        with suppress(TokenizerLost):  # unless the next one is there already
            await process.ask([job("hello there")], first=False)
        await until(lambda: process.counters.restarts == 1 and process.counters.up)
        await until(lambda: is_gone(learner) and is_gone(tokenizer))
        assert len((await process.ask([job("hello there")], first=False)).results) == 1


def forks_of(pid: int | None) -> list[int]:
    return [
        int(each) for task in Path(f"/proc/{pid}/task").iterdir() for each in (task / "children").read_text().split()
    ]


async def test_a_process_that_only_began_to_load_ends_with_its_node() -> None:
    before, process = children(), TokenizerProcess(SETUP)
    await process.begin()
    begun = children() - before
    await process.close()
    assert begun
    assert not begun & children()


def children() -> set[str]:
    """The processes that this one has started."""
    return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


async def test_a_process_that_ends_at_its_start_is_an_error_with_its_code(tmp_path: Path) -> None:
    with trio.fail_after(DEADLINE_S), pytest.raises(TokenizerLost, match="code 7"):
        await TokenizerProcess(SETUP, script(tmp_path / "odd.py", "sys.exit(7)")).start()


async def test_the_process_knows_no_secret_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANVIER_CONTROL_KEY", "open sesame")
    monkeypatch.setenv("HF_TOKEN", "of the hub")
    out = tmp_path / "environment"
    command = script(tmp_path / "odd.py", f"open({str(out)!r}, 'w').write(str(os.environ))", *GOOD_FACTS)
    async with running(command=command):
        assert "open sesame" not in out.read_text()
        assert "of the hub" in out.read_text()


def test_signals_that_stop_a_node_leave_its_tokenizer_to_the_drain(shared: Shared) -> None:
    assert shared.process.pid is not None
    assert os.getpgid(shared.process.pid) != os.getpgid(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(shared.process.pid, number)
    assert shared.ask([job("hello")], first=True).results[0].status is Status.DONE
    assert shared.process.counters.restarts == 0


OWNER = f"""
import trio
from ranvier_py.io.tokenizer_process import TokenizerProcess
from ranvier_py.core.tokenize.tokenize_frames import Setup
async def main():
    process = TokenizerProcess(Setup({str(EMBEDDED)!r}, "", bytes(32), 16, 3))
    await process.start()
    print(process.pid, flush=True)
    await trio.sleep_forever()
trio.run(main)
"""


async def test_the_process_ends_when_its_node_is_killed() -> None:
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            start = partial(trio.run_process, [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, check=False)
            owner: trio.Process = await nursery.start(start)
            assert owner.stdout is not None
            pid = int(await owner.stdout.receive_some())
            assert not is_gone(pid)
            owner.kill()
            await until(lambda: is_gone(pid))


@pytest.mark.parametrize("source", [None, "embedded", "/nowhere"], ids=["at once", "while it loads", "and it can't"])
def test_a_process_whose_node_ends_before_it_could_answer_ends_without_a_word(source: str | None) -> None:
    pairs = [socket.socketpair() for _ in range(FIRST_SOCKETS + 1)]
    fds = [theirs.fileno() for _, theirs in pairs]
    with subprocess.Popen([*COMMAND, *map(str, fds)], pass_fds=fds, stderr=subprocess.PIPE) as child:
        for _, theirs in pairs:
            theirs.close()
        if source is not None:
            pairs[0][0].sendall(encode_setup(Setup(source, "", bytes(32), 16, 0)))
        for ours, _ in pairs:
            ours.close()
        assert child.stderr is not None
        assert child.stderr.read() == b""


def test_memory_that_jobs_ask_for_is_bounded(shared: Shared) -> None:
    assert shared.process.pid is not None
    most, _ = resource.prlimit(shared.process.pid, resource.RLIMIT_DATA)
    assert 0 < most < 3 << 30


def test_a_node_imports_no_tokenizer() -> None:
    code = "import sys; from ranvier_py.node import node; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"transformers", "tokenizers", "huggingface_hub", "ranvier_py.io.tokenizer"}.isdisjoint(found)
    assert "ranvier_py.io.tokenizer_process" in found
