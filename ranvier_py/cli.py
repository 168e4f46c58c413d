"""The command line: `ranvier serve | config | explain | status | clients | replay | lint | reporter | version`.

Flags of `serve` and `config` are derived from the fields of Config; no key is repeated here. `explain`, `status` and
`clients` are clients of a node's control port. Each command returns an exit code; see EXIT_CODES.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import trio

from ranvier_py import __version__
from ranvier_py.config.config_endpoints import config_of_worker
from ranvier_py.config.config_loader import (
    FILE_VARIABLE,
    Loaded,
    file_in_use,
    flag_of,
    load,
    variable_of,
)
from ranvier_py.config.config_model import KEYS, SECRETS, Config
from ranvier_py.config.config_reference import as_toml, help_of, reference, toml_value
from ranvier_py.config.config_values import did_you_mean
from ranvier_py.config.rule_files import rule_book
from ranvier_py.config.secret_files import read_secret_file
from ranvier_py.control.status_page import NodeStatus, divergence, status_page
from ranvier_py.core.errors import ConfigError, ListenError, leaves
from ranvier_py.io.logs import last_words, set_up_logs
from ranvier_py.io.workers import Supervisor
from ranvier_py.replay.lint_command import add_flags as add_lint_flags
from ranvier_py.replay.lint_command import body_of, lint, report, trial_page
from ranvier_py.replay.lint_command import page as lint_page
from ranvier_py.replay.replay_flags import add_flags as add_replay_flags
from ranvier_py.replay.traces.lines import raw_lines
from ranvier_py.reporter import KEY_VARIABLE
from ranvier_py.reporter import add_flags as add_reporter_flags

log = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILED, EXIT_CONFIG, EXIT_ADDRESS, EXIT_UNREACHABLE = range(5)
EXIT_CODES = """exit codes:
  0  done, or stopped by a signal after draining
  1  failed while running, or the node refused what was asked
  2  the command line or the configuration is wrong; every problem is listed
  3  an address can't be listened on
  4  the control port can't be reached"""

SHORT_FLAGS = {"record_file": ("--record",)}
"""Additional flags of a key."""

KILL_MARGIN_S = 10.0
"""Time that workers have after the drain deadline to close down before they are killed."""

ADMIN_TIMEOUT_S = 10.0
INTERVAL_MIN_S, INTERVAL_MAX_S = 0.1, 86_400.0
"""Seconds between two pages of a watched status: not too many requests for the node, and no wait beyond a day."""

HEADER = re.compile(r"\s*([!#$%&'*+.^_`|~0-9A-Za-z-]+)\s*:\s*([^\r\n\0]*)")
DEFAULT_CONTROL = "http://127.0.0.1:9180"


class CommandError(Exception):
    """Ends a command with a message for stderr and an exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. `argv` has no program name; None: sys.argv."""
    open_standard_streams()
    parser = make_parser()
    options, extra = parser.parse_known_args(argv)
    try:
        options.problems = list(unknown_arguments(extra, options.flags()))
        if options.problems and not hasattr(options, "config"):
            raise ConfigError(options.problems)
        code = int(options.run(options))
        sys.stdout.flush()  # here, where an error is caught; printing nothing instead would fail on a full disk
        return code
    except ConfigError as error:
        print(
            "\n".join(["ranvier: the configuration has problems:", *(f"  {line}" for line in error.problems)]),
            file=sys.stderr,
        )
        return EXIT_CONFIG
    except CommandError as error:
        print(f"ranvier: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        return EXIT_OK
    except BrokenPipeError:  # `ranvier status | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"ranvier: the output can't be written: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the rest of the output can't be written either
        return EXIT_FAILED


def open_standard_streams() -> None:
    """Open missing standard streams as /dev/null: else a socket would get the descriptor, and what is printed."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115  # for good


# --- the parser -----------------------------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    style: Any = partial(
        argparse.ArgumentParser,
        allow_abbrev=False,  # --control-key must not mean --control-key-file
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EXIT_CODES,
    )
    parser: argparse.ArgumentParser = style(prog="ranvier", description="A cache-aware router for LLM engines.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=style)

    def command(name: str, run: Callable[[argparse.Namespace], int], meaning: str, **more: Any) -> Any:
        made = commands.add_parser(name, help=meaning, **more)
        made.set_defaults(run=run, flags=partial(flags_of, made))
        return made

    usage = "ranvier %s [--config FILE] [--KEY VALUE ...]"
    add_config_flags(command("serve", serve_command, "run a node, or several on one port", usage=usage % "serve"))
    meaning = "print every key with its help and default"
    config = command("config", config_command, meaning, usage=usage % "config [--check | --from FILE.yaml]")
    config.add_argument("--check", action="store_true", help="load the configuration instead, and list what is wrong")
    meaning = "print this file, TOML or YAML, also one of Continuum Router, as TOML instead"
    config.add_argument("--from", type=Path, dest="source", metavar="FILE", help=meaning)
    add_config_flags(config)
    explain = command("explain", explain_command, "where would this request go, and why (body on stdin)")
    explain.add_argument("file", nargs="?", type=Path, help="the body, instead of stdin")
    meaning = "a field of the request, where tenants are kept apart (a credential as x-api-key)"
    explain.add_argument("--header", action="append", default=[], metavar="NAME:VALUE", help=meaning)
    add_control_flags(explain)
    status = command("status", status_command, "backends, health, load, routes and requests of a node")
    status.add_argument("--watch", action="store_true", help="again and again, until Ctrl-C")
    status.add_argument("--interval-s", type=float, default=2.0, metavar="S", help="time between two pages (2)")
    status.add_argument("--against", metavar="URL", help="control port of another node, to compare the route tables")
    add_control_flags(status)
    meaning = "what clients do to their own prefixes, as a node sees it"
    add_control_flags(command("clients", clients_command, meaning))
    add_replay_flags(command("replay", replay_command, "what would each policy have done with this traffic"))
    linter = command(
        "lint", lint_command, "what clients do to their own prefixes, in captured requests or live traffic"
    )
    add_lint_flags(linter)
    add_control_key_flag(linter)
    add_reporter_flags(
        command("reporter", reporter_command, "report what an engine holds to routers, by its KV events")
    )
    command("version", version_command, "print the version")
    return parser


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Add --config, and one flag for each key that is no secret. Flags that are not given set nothing."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help=f"TOML or YAML file; ${FILE_VARIABLE} names one too"
    )
    groups: dict[str, Any] = {}
    for name, key in KEYS.items():
        if name in SECRETS:
            continue
        section = key.option.section
        group = groups[section] = groups.get(section) or parser.add_argument_group(section)
        options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": help_of(key).replace("%", "%%")}
        if key.annotation is bool:
            group.add_argument(flag_of(name), action=argparse.BooleanOptionalAction, **options)
        elif isinstance(key.option.default, tuple):
            group.add_argument(flag_of(name), action="append", metavar="X", **options)
        else:
            group.add_argument(flag_of(name), *SHORT_FLAGS.get(name, ()), metavar="X", **options)


def add_control_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--control", default=DEFAULT_CONTROL, metavar="URL", help=f"control port ({DEFAULT_CONTROL})")
    add_control_key_flag(parser)


def add_control_key_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--control-key-file",
        type=Path,
        metavar="FILE",
        help=f"its key; ${variable_of('control_key')} holds one, or ${variable_of('control_key_file')} names a file",
    )


def flags_of(parser: argparse.ArgumentParser) -> list[str]:
    """Return the long flags in the help of a parser."""
    return re.findall(r"--[a-z][a-z-]+", parser.format_help())


def unknown_arguments(extra: Sequence[str], flags: Sequence[str]) -> Iterator[str]:
    """Yield a problem for each unknown flag, and for each value that belongs to no flag. `flags` are the known ones."""
    after_unknown_flag = False
    for argument in extra:
        name = argument.partition("=")[0]
        if name.startswith("-"):
            if name in map(flag_of, SECRETS):
                yield f"{name}: a secret has no flag; use {name}-file or ${variable_of(name[2:].replace('-', '_'))}"
            else:
                yield f"{name}: no such flag{did_you_mean(name, flags)}"
        elif not after_unknown_flag:
            yield f"{name}: an argument that belongs to no flag"
        after_unknown_flag = name.startswith("-")


def load_from(options: argparse.Namespace, file: Path | None = None, **more: Any) -> Loaded:
    """Load the configuration of these flags. Raises ConfigError with all problems, those of flags first."""
    given = vars(options)
    flags = {name: given[name] for name in KEYS if name in given}
    try:
        loaded = load(flags, file or options.config, **more)
    except ConfigError as error:
        raise ConfigError([*options.problems, *error.problems]) from error
    if options.problems:
        raise ConfigError(options.problems)
    return loaded


# --- serve ----------------------------------------------------------------------------------------------------------


def serve_command(options: argparse.Namespace) -> int:
    config, _, notes = load_from(options)
    set_up_logs(config.log_level, config.log_format, secrets=config.secret_values())
    for note in notes:
        log.warning("config.note %s", note)
    if not os.isatty(0):  # SIGHUP means to read the configuration again; it is ignored until the node is ready
        signal.signal(signal.SIGHUP, lambda *_: None)
    if config.workers == 1:
        return run_node(config, partial(load_from, options))
    key = secrets.token_bytes(32)  # the workers get it by fork, now and at a restart; nobody else ever does
    supervisor = Supervisor(
        config.workers,
        lambda index: run_worker(options, config, index, key, is_newer=supervisor.hang_ups > 0),
        stop_timeout_s=config.drain_timeout_s + KILL_MARGIN_S,
        fatal=(EXIT_CONFIG, EXIT_ADDRESS),
    )
    return supervisor.run()


def run_worker(options: argparse.Namespace, config: Config, index: int, key: bytes, *, is_newer: bool) -> int:
    """Run one of several workers in this process. `is_newer`: the others have read their configuration again since."""

    def spread() -> None:
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:
            os.kill(os.getppid(), signal.SIGHUP)

    own = partial(config_of_worker, index=index, key=key)
    return run_node(config, partial(load_from, options), own=own, spread=spread, is_newer=is_newer)


def run_node(config: Config, load: Callable[[], Loaded], **source: Any) -> int:
    """Run a node in this process until a signal ends it; `load` reads its configuration anew. Returns the exit code."""
    from ranvier_py.control.control_port import serve_node
    from ranvier_py.node.reload import ConfigSource
    from ranvier_py.node.run_node import run

    try:
        trio.run(partial(run, config, serve_node, source=ConfigSource(load, **source)))
    except (Exception, BaseExceptionGroup) as error:
        known = [describe(leaf) for leaf in leaves(error)]
        if any(code == EXIT_FAILED for _, code in known):
            log.critical("node.failed", exc_info=error)  # Python's own traceback would block if nobody reads stderr
            return EXIT_FAILED
        last_words("\n".join(f"ranvier: {message}" for message, _ in known))
        return max(code for _, code in known)
    return EXIT_OK


def describe(error: BaseException) -> tuple[str, int]:
    if isinstance(error, KeyboardInterrupt):
        return "stopped", EXIT_OK
    if isinstance(error, ConfigError):
        return str(error), EXIT_CONFIG
    if isinstance(error, ListenError):
        return f"can't listen: {error}", EXIT_ADDRESS
    return str(error), EXIT_FAILED


# --- the other commands ---------------------------------------------------------------------------------------------


def config_command(options: argparse.Namespace) -> int:
    if options.source is not None:
        config, origins, notes = load_from(options, options.source)
        print(as_toml(config, origins, notes), end="")
        return EXIT_OK
    if not options.check:
        if options.problems:
            raise ConfigError(options.problems)
        print(reference(), end="")
        return EXIT_OK
    config, origins, notes = checked_config(options)
    values = config.shown()
    for name, origin in origins.items():
        print(f"{name} = {toml_value(values[name])}  # from {origin}")
    for note in notes:
        print(f"note: {note}")
    print(f"good: {len(origins)} keys are set, {len(values) - len(origins)} have their defaults")
    return EXIT_OK


def checked_config(options: argparse.Namespace) -> Loaded:
    """Load the configuration, and check all of its files. Raises ConfigError, whose last problems are the notes."""
    from ranvier_py.node.config_check import file_notes, file_problems

    notes: list[str] = []

    def problems(found: Loaded) -> Iterator[str]:
        notes.extend([*found.notes, *file_notes(found, file_in_use(options.config))])
        yield from file_problems(found.config)

    try:
        config, origins, _ = load_from(options, also=problems)
    except ConfigError as error:
        raise ConfigError([*error.problems, *(f"note: {note}" for note in notes)]) from error
    return Loaded(config, origins, notes)


def replay_command(options: argparse.Namespace) -> int:
    from ranvier_py.replay import replay_command as command

    return command.replay(options)


def reporter_command(options: argparse.Namespace) -> int:
    from ranvier_py.reporter import reporter_command as command

    return command.report(options, bearer_key(KEY_VARIABLE, options.key_file))


def version_command(_: argparse.Namespace) -> int:
    print(__version__)
    return EXIT_OK


def explain_command(options: argparse.Namespace) -> int:
    fields = []
    for line in options.header:
        if (found := HEADER.fullmatch(line)) is None:
            raise CommandError("--header takes NAME:VALUE", EXIT_CONFIG)  # the argument may be a key
        fields.append((found[1].encode(), os.fsencode(found[2].rstrip())))
    try:
        body = options.file.read_bytes() if options.file else sys.stdin.buffer.read()
    except OSError as error:
        raise CommandError(str(error), EXIT_FAILED) from error
    with control_client(options) as client:
        print(asked(client, "POST", "/explain", content=body, headers=fields).text)
    return EXIT_OK


def clients_command(options: argparse.Namespace) -> int:
    with control_client(options) as client, of_a_node(client):
        view = asked(client, "GET", "/admin/clients").json()
        print("\n".join([*lint_page(view["clients"]), *trial_page(view["trials"])]))
    return EXIT_OK


def lint_command(options: argparse.Namespace) -> int:
    """Lint files or a URL. A URL without a path is a node's; only a node gets the control key."""
    if bool(options.files) == bool(options.url):
        raise CommandError("lint takes FILE, or --url URL", EXIT_CONFIG)
    book = rule_book(options.client_rules_file)
    if options.files:
        return lint([(str(path), raw_lines(path)) for path in options.files], book, as_json=options.json)
    url = control_url(options.url)
    if url.path in ("", "/"):
        with control_client(options, options.url) as client, of_a_node(client):
            return report(asked(client, "GET", "/admin/clients").json()["clients"], as_json=options.json)
    with httpx.Client(timeout=ADMIN_TIMEOUT_S, trust_env=False) as client:
        try:
            with client.stream("GET", url) as answer:
                if answer.status_code != httpx.codes.OK:
                    raise CommandError(f"{url} answered {answer.status_code}", EXIT_FAILED)
                return lint([body_of(str(url), answer.iter_bytes())], book, as_json=options.json)
        except httpx.HTTPError as error:
            raise CommandError(f"{url} can't be reached: {error}", EXIT_UNREACHABLE) from error


def status_command(options: argparse.Namespace) -> int:
    with control_client(options) as client, control_client(options, options.against) as other:
        reached = False
        while True:
            try:
                with of_a_node(client):
                    page = status_page(node_status(client, other if options.against else None))
                reached = True
            except CommandError as error:
                if not (options.watch and reached):
                    raise
                page = f"{error}\n"  # it may be restarting: go on watching
            print(f"\x1b[H\x1b[2J{page}" if options.watch and sys.stdout.isatty() else page, flush=True)
            if not options.watch:
                return EXIT_OK
            time.sleep(min(max(INTERVAL_MIN_S, options.interval_s), INTERVAL_MAX_S))


def node_status(client: httpx.Client, other: httpx.Client | None) -> NodeStatus:
    ready = asked(client, "GET", "/readyz", also=503)
    cluster = asked(client, "GET", "/admin/cluster", also=404)
    sums = [asked(each, "GET", "/admin/cluster/sums").content for each in (client, other) if each and other]
    return NodeStatus(
        cluster=cluster.json() if cluster.status_code == httpx.codes.OK else None,
        divergence=divergence(*sums) if sums else "",
        engine_caches=asked(client, "GET", "/admin/engine-cache").json(),
        calibration=asked(client, "GET", "/admin/calibration").json(),
        responses=asked(client, "GET", "/admin/response-cache/stats").json(),
        address=str(client.base_url),
        ready=ready.status_code == httpx.codes.OK,
        reason=ready.json().get("reason", ""),
        backends=asked(client, "GET", "/admin/backends").json()["backends"],
        routes=asked(client, "GET", "/admin/routes").json(),
    )


def control_client(options: argparse.Namespace, address: str | None = None) -> httpx.Client:
    """Return a client for `address`, else --control. Raises CommandError or ConfigError; no message shows the key."""
    key = bearer_key(variable_of("control_key"), options.control_key_file)
    url = control_url(options.control if address is None else address)
    headers = {b"authorization": f"Bearer {key}".encode()} if key else {}
    return httpx.Client(base_url=url, headers=headers, timeout=ADMIN_TIMEOUT_S, trust_env=False)


def bearer_key(variable: str, file: Path | None) -> str:
    """Return the key of this file, else of this variable or of the file that its twin names, else "". Raises
    ConfigError."""
    key, named = os.environ.get(variable, "").strip(), os.environ.get(f"{variable}_FILE", "")
    if file is None and key and named:
        raise ConfigError([f"{variable}_FILE: {variable} is set as well; set one of them"])
    if file is not None or named:
        return read_secret_file(file or Path(named))
    if not key.isprintable():
        raise ConfigError([f"{variable} must be one line of text, the key"])
    return key


def control_url(address: str) -> httpx.URL:
    """Parse "HOST:PORT" or a URL. Raises CommandError."""
    with suppress(httpx.InvalidURL, ValueError):
        url = httpx.URL(address if "://" in address else f"http://{address}")
        if url.scheme in ("http", "https") and url.host:
            return url
    raise CommandError(f"{address!r} is no control port, expected one like {DEFAULT_CONTROL}", EXIT_CONFIG)


def asked(client: httpx.Client, method: str, path: str, also: int = 200, **sent: Any) -> httpx.Response:
    """Return the node's answer. Raises CommandError, with the node's message if it refuses, or if there is no node."""
    try:
        response = client.request(method, path, **sent)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CommandError(f"{client.base_url} can't be reached: {error}", EXIT_UNREACHABLE) from error
    if response.status_code not in (httpx.codes.OK, also):
        raise CommandError(f"{response.status_code}: {refusal(response)}", EXIT_FAILED)
    return response


@contextmanager
def of_a_node(client: httpx.Client) -> Iterator[None]:
    """Raise CommandError if reading the answers inside fails, because an engine, say, answered instead of a node."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        text = f"{client.base_url} answers, but not as the control port of a node of this version does"
        raise CommandError(f"{text} ({type(error).__name__}: {error})"[:400], EXIT_FAILED) from error


def refusal(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]
