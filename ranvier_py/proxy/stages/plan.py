"""Decides which backend is asked: a plan has one leg, a request to that backend. A failed leg makes another plan."""

from ranvier_py.core.routing.attempt import Attempt, PoolMatch
from ranvier_py.core.routing.router import Router
from ranvier_py.proxy.call import Call


def next_leg(router: Router, call: Call, found: PoolMatch) -> Attempt:
    """Place the prompt among those found, and begin the leg."""
    decision = router.place(call.read.prompt, found)
    call.attempt = attempt = router.start_attempt(call.read.prompt, decision, found.at, call.id, found, quiet=True)
    attempt.judged = call.read.judged
    call.tries += 1
    return attempt
