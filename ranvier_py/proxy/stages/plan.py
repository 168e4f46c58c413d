"""Decides which backends are asked, in what order; a leg that fails makes another plan."""

from ranvier_py.core.routing.attempt import Attempt, Leg, Plan, PoolMatch
from ranvier_py.core.routing.router import Router
from ranvier_py.proxy.call import Call


def one_leg(router: Router, call: Call, found: PoolMatch) -> Plan:
    """Place the prompt among those found: one engine prefills and decodes."""
    return (Leg(router.place(call.read.prompt, found)),)


def begin(router: Router, call: Call, leg: Leg, found: PoolMatch) -> Attempt:
    """Count a leg as in flight at its backend."""
    prompt = call.read.prompt
    if call.attempt is not None:
        call.earlier = (*call.earlier, call.attempt)
    call.attempt = attempt = router.start_attempt(prompt, leg.decision, found.at, call.id, found, quiet=True)
    attempt.judged = call.read.request.computes
    call.tries += 1
    return attempt
