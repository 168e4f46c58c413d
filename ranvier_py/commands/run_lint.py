"""`ranvier lint`: what clients do to their own prefixes, in files, at an address or in a node's live traffic."""

from __future__ import annotations

import argparse

import httpx

from ranvier_py.commands.control_client import (
    ADMIN_TIMEOUT_S,
    add_control_key_flag,
    asked,
    control_client,
    control_url,
    of_a_node,
    unreachable,
)
from ranvier_py.commands.exit_codes import EXIT_CONFIG, EXIT_FAILED, CommandError
from ranvier_py.config.rule_files import rule_book
from ranvier_py.replay import lint_command
from ranvier_py.replay.lint_command import body_of, lint, report
from ranvier_py.replay.traces.lines import raw_lines


def add_flags(parser: argparse.ArgumentParser) -> None:
    lint_command.add_flags(parser)
    add_control_key_flag(parser)


def run(options: argparse.Namespace) -> int:
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
            raise unreachable(url, error) from error
