"""A wait for what nobody here can be woken by: another process, a thread, a log. The deadline is the caller's."""

from collections.abc import Callable

import trio


async def until(holds: Callable[[], object]) -> None:
    while not holds():  # noqa: ASYNC110  # without a pause it would take the core from what it waits for
        await trio.sleep(0.002)
