"""`ranvier serve`: a node, or several on one port. The node is imported when it starts, by each worker for itself."""

from __future__ import annotations

import argparse
import logging
import os
import re
import secrets
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from ranvier_py.commands.config_flags import add_config_flags, load_from
from ranvier_py.commands.exit_codes import EXIT_ADDRESS, EXIT_CONFIG, EXIT_CUT, EXIT_FAILED, EXIT_OK, PROBLEMS
from ranvier_py.config.config_endpoints import config_of_worker
from ranvier_py.config.config_loader import Loaded, file_in_use
from ranvier_py.config.config_model import Config
from ranvier_py.config.config_names import variable_of
from ranvier_py.core.addresses import host_port
from ranvier_py.core.errors import ConfigError, ListenError, leaves, listening_on
from ranvier_py.core.log_events import event
from ranvier_py.io.logs import last_words, set_up_logs
from ranvier_py.io.workers import Supervisor, claimed

if TYPE_CHECKING:
    from ranvier_py.node.part import Node, Part

log = logging.getLogger(__name__)

JSON_LINE = re.compile(rb"""(?m)^\s*["']?log_format["']?\s*[=:]\s*["']?json\b""")
"""As TOML and YAML have it: what is wrong with the file may be its syntax."""

FILE_BYTES_LOOKED_AT = 1 << 20

KILL_MARGIN_S = 10.0
"""Time that workers have after the drain deadline to close down before they are killed."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = "ranvier serve [--config FILE] [--KEY VALUE ...]"
    add_config_flags(parser)


def run(options: argparse.Namespace) -> int:
    try:
        config, _, notes = load_from(options)
    except ConfigError as error:
        if not wants_json(options):
            raise
        set_up_logs("info", "json")
        last_words("\n".join([f"ranvier: {PROBLEMS}", *(f"  {line}" for line in error.problems)]))
        return EXIT_CONFIG
    set_up_logs(config.log_level, config.log_format, secrets=config.secret_values())
    for note in notes:
        log.warning(event("config.note", note=note))
    if not os.isatty(0):  # SIGHUP means to read the configuration again; it is ignored until the node is ready
        signal.signal(signal.SIGHUP, lambda *_: None)
    if config.workers == 1:
        return run_node(config, partial(load_from, options))
    try:
        with listening_on(config.listen):
            claims = claimed(*host_port(config.listen))
    except ListenError as error:
        last_words(f"ranvier: {describe(error)[0]}")
        return EXIT_ADDRESS
    key = secrets.token_bytes(32)  # the workers get it by fork, now and at a restart; nobody else ever does
    supervisor = Supervisor(
        config.workers,
        lambda index: run_worker(options, config, index, key, is_newer=supervisor.hang_ups > 0),
        stop_timeout_s=config.drain_timeout_s + KILL_MARGIN_S,
        fatal=(EXIT_CONFIG, EXIT_ADDRESS),
        claims=claims,
    )
    return supervisor.run()


def wants_json(options: argparse.Namespace) -> bool:
    """Whether a configuration that can't be used wants all lines as JSON, as far as that can be seen."""
    given = getattr(options, "log_format", None) or os.environ.get(variable_of("log_format"))
    file = file_in_use(options.config)
    if given or file is None:
        return given == "json"
    with suppress(OSError):
        return JSON_LINE.search(file.read_bytes()[:FILE_BYTES_LOOKED_AT]) is not None
    return False


def run_worker(options: argparse.Namespace, config: Config, index: int, key: bytes, *, is_newer: bool) -> int:
    """Run one of several workers in this process. `is_newer`: the others have read their configuration again since."""

    def spread() -> None:
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:
            os.kill(os.getppid(), signal.SIGHUP)

    own = partial(config_of_worker, index=index, key=key)
    return run_node(config, partial(load_from, options), own=own, spread=spread, is_newer=is_newer)


def run_node(config: Config, load: Callable[[], Loaded], **source: Any) -> int:
    """Run a node in this process until a signal ends it; `load` reads its configuration anew. Returns the exit code."""
    from ranvier_py.node.config_source import ConfigSource
    from ranvier_py.node.run_node import run

    try:
        cut_by = trio.run(partial(run, config, control_port, source=ConfigSource(load, **source)))
    except (Exception, BaseExceptionGroup) as error:
        known = [describe(leaf) for leaf in leaves(error)]
        if any(code == EXIT_FAILED for _, code in known):
            log.critical(
                event("node.failed"), exc_info=error
            )  # Python's own traceback would block if nobody reads stderr
            return EXIT_FAILED
        last_words("\n".join(f"ranvier: {message}" for message, _ in known))
        return max(code for _, code in known)
    return EXIT_CUT if cut_by is signal.SIGINT else EXIT_OK


def control_port() -> Callable[[Node], Part]:
    """Return what makes a node's control port; imported here, while its tokenizer process loads."""
    from ranvier_py.control.control_port import ControlPort

    return ControlPort


def describe(error: BaseException) -> tuple[str, int]:
    if isinstance(error, KeyboardInterrupt):
        return "stopped", EXIT_OK
    if isinstance(error, ConfigError):
        return str(error), EXIT_CONFIG
    if isinstance(error, ListenError):
        return f"can't listen: {error}", EXIT_ADDRESS
    return str(error), EXIT_FAILED
