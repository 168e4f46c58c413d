"""`ranvier serve --tokenizer HUB_ID` against a small hub of our own: real processes, downloads, a cache on disk."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from ranvier_py.io.tokenizer import EMBEDDED, why_not
from tests.pages import Pages, serving

DEADLINE_S = 60.0
"""A process that loads transformers on a busy machine takes a while; each test ends long before."""

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ANSWER = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]}
SHARED = "The ledger in the harbour office lists every ship of the winter, one line for each. " * 20


FILES = {path.name: path.read_bytes() for path in EMBEDDED.iterdir() if path.suffix != ".md"}


class HubPages(Pages):
    """What the hub says of one model, acme/tiny, which has the files of the embedded tokenizer."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(f"{self.command} {path}")
        if path == "/api/models/acme/tiny":
            siblings = [{"rfilename": name} for name in FILES]
            self.reply(200, json.dumps({"id": "acme/tiny", "sha": COMMIT, "siblings": siblings}).encode())
        elif path.startswith("/api/models/acme/tiny/tree/"):
            self.reply(200, json.dumps([listed(name) for name in self.tree()]).encode())
        elif path.startswith("/acme/tiny/resolve/"):
            self.reply_file(path.split("/", 5)[5])
        else:
            self.reply(404, b"Repository not found", {"X-Error-Code": "RepoNotFound"})

    def tree(self) -> list[str]:
        return [] if "additional_chat_templates" in self.path else sorted(FILES)

    def reply_file(self, name: str) -> None:
        data = FILES.get(name)
        if data is None:
            self.reply(404, b"Entry not found", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        else:
            self.reply(200, data, {"ETag": f'"{etag(data)}"', "X-Repo-Commit": COMMIT})


class EnginePages(Pages):
    def do_GET(self) -> None:
        self.reply(200, b"{}")

    def do_POST(self) -> None:
        self.sent()
        self.reply(200, json.dumps(ANSWER).encode())


def listed(name: str) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(FILES[name]), "oid": etag(FILES[name])}


def etag(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


def command(tokenizer: str, *backends: str) -> list[str]:
    flags = ["--listen", "127.0.0.1:0", "--control", "127.0.0.1:0", "--tokenize-deadline-s", "10", "--debug-headers"]
    flags += [part for backend in backends for part in ("--backend", backend)]
    return [sys.executable, "-m", "ranvier_py", "serve", "--tokenizer", tokenizer, *flags]


def environment(hub: str, home: Path) -> dict[str, str]:
    """Ours without what would lead to another hub, another cache or a proxy."""
    kept = {name: value for name, value in os.environ.items() if not re.match("(?i)HF_|RANVIER_|.*_proxy", name)}
    return kept | {"HF_ENDPOINT": hub, "HF_HOME": str(home)}


@contextmanager
def node(tokenizer: str, hub: str, home: Path, *backends: str) -> Iterator[str]:
    """The URL of a node's public port, once it has one; at the end it is told to stop, and must."""
    with subprocess.Popen(
        command(tokenizer, *backends), env=environment(hub, home), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        watch = threading.Timer(DEADLINE_S, process.kill)
        watch.start()
        try:
            words = b""
            while not (found := re.search(rb"^ranvier listening on (\S+)", words, re.MULTILINE)):
                line = process.stdout.readline()
                assert line, words.decode()
                words += line
            yield f"http://{found[1].decode()}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.stdout.read()
            watch.cancel()
    assert process.returncode == 0


def asked(url: str, question: str) -> tuple[str, int]:
    """Reason and matched tokens of one chat."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": question}]}).encode()
    with urllib.request.urlopen(f"{url}/v1/chat/completions", body, timeout=DEADLINE_S) as response:
        return response.headers["x-ranvier-reason"], int(response.headers["x-ranvier-matched-tokens"])


@pytest.mark.slow
def test_a_hub_id_is_fetched_once_and_routes_by_tokens_and_starts_again_without_the_hub(tmp_path: Path) -> None:
    """Only who has the tokens can know that two messages begin alike."""
    with serving(EnginePages) as one, serving(EnginePages) as two:
        engines = (one.url, two.url)
        with serving(HubPages) as hub:
            with node("acme/tiny", hub.url, tmp_path, *engines) as url:
                routes_by_tokens(url)
            fetched = [line for line in hub.asked if line.startswith("GET /acme/tiny/resolve/")]
            assert sorted(line.rpartition("/")[2] for line in fetched) == sorted(FILES)
            gone = hub.url
        with node("acme/tiny", gone, tmp_path, *engines) as url:
            routes_by_tokens(url)


def routes_by_tokens(url: str) -> None:
    """The first question is learned beside its answer, so a later one finds it, if it is asked often enough."""
    until = time.monotonic() + DEADLINE_S
    for number in count():
        reason, matched = asked(url, f"{SHARED}{number}")
        if matched:
            assert reason == "affinity"
            assert matched % 16 == 0
            return
        assert time.monotonic() < until, "no question has met another one's tokens"


@pytest.mark.slow
@pytest.mark.parametrize("is_up", [True, False], ids=["that the hub does not have", "while nobody reaches the hub"])
def test_an_id_that_can_not_be_had_is_one_clear_error(tmp_path: Path, is_up: bool) -> None:
    with serving(HubPages) as hub:
        url = hub.url
        if is_up:
            words = start_in_vain("acme/none", url, tmp_path)
    if is_up:
        assert words == (
            f"ranvier: tokenizer: 'acme/none' can't be loaded: it is no directory, and {url} has no such model, or "
            "none for us: private ones need HF_TOKEN\n"
        )
        return
    began = time.monotonic()
    warning, error = start_in_vain("acme/tiny", url, tmp_path).splitlines()
    assert warning.endswith(f"tokenizer.hub {url} can't be reached, trying its cache: ConnectError")
    assert error == (
        "ranvier: tokenizer: 'acme/tiny' can't be loaded: the hub can't be reached, and its cache on this machine does "
        "not have it"
    )
    assert time.monotonic() - began < DEADLINE_S / 2, "the library's own retries take 50 s"


@pytest.mark.slow
def test_a_cache_of_downloads_that_can_not_be_used_is_named_and_how_to_have_another(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with serving(HubPages) as hub:
        words = start_in_vain("acme/tiny", hub.url, tmp_path / "file" / "cache")
    assert words == (
        "ranvier: tokenizer: 'acme/tiny' can't be loaded: the cache of downloads can't be used: "
        f"{tmp_path}/file/cache/token: Not a directory; set HF_HOME to a directory\n"
    )


def test_a_folder_that_nobody_may_make_is_named_behind_what_the_library_makes_of_it() -> None:
    refused = OSError("PermissionError at /none when downloading acme/tiny. Common causes: ...")
    refused.__cause__ = PermissionError(errno.EACCES, "Permission denied", "/none")
    assert why_not("acme/tiny", refused) == (
        "the cache of downloads can't be used: /none: Permission denied; set HF_HOME to a directory"
    )
    assert why_not("acme/tiny", OSError("no file named tokenizer.json")).startswith(
        "its files make no tokenizer: OSError"
    )


def start_in_vain(tokenizer: str, hub: str, home: Path) -> str:
    """What a start that must fail says."""
    done = subprocess.run(
        command(tokenizer, "http://127.0.0.1:9"),
        env=environment(hub, home),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 2
    return done.stderr
