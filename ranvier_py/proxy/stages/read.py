"""Reads the prompt of a request from its body: mended, and without what only routers may set.

What is to be stripped shows only once the body was read; such a body is stripped, mended and read once more.
"""

from dataclasses import dataclass

from ranvier_py.core.prompts.form_model import form_model
from ranvier_py.core.prompts.reserved_members import NOTHING
from ranvier_py.core.prompts.tenants import Tenants
from ranvier_py.core.routing.request_paths import RESPONSES_PATH
from ranvier_py.core.routing.router import Router
from ranvier_py.core.routing.stored_paths import STORED, response_of
from ranvier_py.proxy.admission.tenant_rules import check_names, tenant_of
from ranvier_py.proxy.call import Call, PipelineLimits, ReadRequest
from ranvier_py.proxy.driver import Steps, in_portions
from ranvier_py.proxy.http_values import HttpRequest
from ranvier_py.proxy.realtime import Realtime, model_of, upgrades
from ranvier_py.proxy.stages.mend import MendStage
from ranvier_py.proxy.stages.strip import RouterFields


@dataclass(slots=True, eq=False, repr=False)
class ReadStage:
    router: Router
    limits: PipelineLimits
    strip: RouterFields
    mend: MendStage
    tenants: Tenants | None  # identifies tenants, if they are kept apart
    realtime: Realtime

    def __call__(self, call: Call) -> Steps[None] | None:
        call.read = read = self._read(call, call.request)
        return self._checked(call, read) if read.prompt.reserved is not NOTHING and call.request.body else None

    def _checked(self, call: Call, read: ReadRequest) -> Steps[None]:
        """Take out what only routers may set; refuse what may name another tenant's response."""
        yield from check_names(self.tenants, read.request, read.prompt)
        names = yield from self.strip.found(read.request, read.prompt, self.limits.router_fields)
        if names:
            call.read = read = self._read(call, self.strip.without(read.unmended or read.request, names))
        if read.request.fields.multipart and not read.prompt.model:
            read.prompt.model = (yield from in_portions(form_model(read.request.body))).name

    def _read(self, call: Call, request: HttpRequest) -> ReadRequest:
        router, fields, tenants = self.router, request.fields, self.tenants
        path = request.path if request.method == b"POST" and fields.readable else b""
        tenant = tenant_of(tenants, request) if tenants is not None else b""
        mended, unmended = self.mend(path, request) if self.mend.mender is not None else None, None
        prompt = router.read(path, request.body if mended is None else mended.body, tenant, fields.session)
        if mended is not None:
            prompt.rules = [use._replace(tenant=tenant) for use in mended.uses]
            if mended.sent is not request.body:
                request, unmended = request.with_body(mended.sent), request
        prompt.client, prompt.sub_agent = fields.client, fields.sub_agent
        if call.identity is not None:
            prompt.owner = call.identity.tenant.name
        upgraded = fields.upgrades and upgrades(request)
        if upgraded:
            self.realtime.check(self.limits.realtime)
            call.client.must_close = True
            prompt.model = model_of(request.target)
        is_kept = path == RESPONSES_PATH and prompt.stores
        if request.path.startswith(STORED) and (named := response_of(request.method, request.path)):
            owner = tenants.of(request.headers) if tenants is not None else b""
            prompt.response_key = router.owners.response_key(named, owner)
        return ReadRequest(
            request=request,
            unmended=unmended,
            prompt=prompt,
            tenant=tenant,
            upgrades=upgraded,
            is_kept=is_kept,
        )
