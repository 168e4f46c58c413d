"""`ranvier check`: everything that a node with this configuration needs of the world, at once, the worst first.

Rule: each check is one function of the configuration, and none changes anything. To add one, write it and add it to the
list. One that fails is a finding itself. Bound: CHECK_LIMIT_S for all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import trio

from ranvier_py.config.config_model import Config
from ranvier_py.core.errors import words_of
from ranvier_py.core.findings import Finding, Severity, badness
from ranvier_py.node.checks.engine_checks import check_engines
from ranvier_py.node.checks.host_checks import (
    check_certificates,
    check_control_key,
    check_descriptors,
    check_ports,
)
from ranvier_py.node.checks.peer_checks import check_peers
from ranvier_py.node.checks.source_checks import check_stores

CHECK_LIMIT_S = 120.0

Check = Callable[[Config], Awaitable[Sequence[Finding]]]

CHECKS: Sequence[Check] = (
    check_ports,
    check_engines,
    check_peers,
    check_stores,
    check_certificates,
    check_control_key,
    check_descriptors,
)


async def live_findings(config: Config, checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """Run all checks side by side."""
    found: list[Finding] = []

    async def run(check: Check) -> None:
        name = check.__name__.removeprefix("check_")
        try:
            with trio.fail_after(CHECK_LIMIT_S):
                found.extend(await check(config))
        except trio.TooSlowError:
            words = f"the check of {name} was not done within {CHECK_LIMIT_S:g} s"
            found.append(Finding("check", Severity.NOTICE, words, about=name, remedy="Try again."))
        except Exception as error:  # the others are to be heard all the same
            words = f"the check of {name} failed: {words_of(error)}"
            found.append(Finding("check", Severity.NOTICE, words, about=name, remedy="Report this as a bug."))

    async with trio.open_nursery() as nursery:
        for check in checks:
            nursery.start_soon(run, check)
    return sorted(found, key=badness, reverse=True)
