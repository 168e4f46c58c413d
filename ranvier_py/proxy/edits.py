"""What of a body is changed for an engine, and in which order; all other bytes stay as the client wrote them:

    model, strip, mend   before the body is read, and for all legs: what is matched has to be what engines get
    usage         the question for a stream's counts   for each leg, as its backend takes it
    salt          the tenant's, as the last member     for each leg, as its backend takes it
    mark          `cache_control` of a system prompt   for each leg, if the operator wants that
    leg           what its plan and the legs before it bring
Rule: the last four are splices of the body that was read, made without a look at each other and applied at once.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ranvier_py.core.answers.usage_injection import UsageAsker
from ranvier_py.core.prompts.body_json import Splice, spliced
from ranvier_py.core.prompts.cache_control import marker_splice
from ranvier_py.core.prompts.tenants import salt_splices
from ranvier_py.core.routing.attempt import Attempt, Edit, RouterCounters
from ranvier_py.core.routing.request_paths import MESSAGES_PATH
from ranvier_py.proxy.call import ReadRequest
from ranvier_py.proxy.http_values import HttpRequest


@dataclass(slots=True, eq=False, repr=False)
class LegEdits:
    asking: UsageAsker
    counters: RouterCounters
    marks: bool  # whether the operator wants markers on system prompts

    def made(
        self, read: ReadRequest, attempt: Attempt, edits: Iterable[Edit], *, asks: bool
    ) -> tuple[HttpRequest, bool]:
        """Return the request as this leg's backend gets it, and whether it is asked for counts."""
        request, prompt, usage = read.request, attempt.prompt, None
        splices: list[Splice] = []
        if read.unmended is not None and attempt.target.catalog.hosted:  # a provider came since the body was read
            request = read.unmended
        body = request.body
        if asks and prompt.stream:
            usage = self.asking.splice(prompt, body, attempt.target.id, attempt.generation)
            if usage is not None:
                splices.append(usage)
        if prompt.salt:
            if attempt.target.catalog.takes_salt(request.path):
                splices += salt_splices(body, prompt.salt)
            else:  # by its model cards it keeps no prompts apart
                self.counters.unsalted += 1
        if self.marks and request.path == MESSAGES_PATH and (mark := marker_splice(body)) is not None:
            splices.append(mark)
        for edit in edits:
            splices += edit(body)
        return (request.with_body(spliced(body, splices)) if splices else request), usage is not None
