"""What a node answers by itself: health and time, the models that it serves, and what no engine behind it can do.

Rules: one model is found however its id is spelled in a path, with its slashes or as SDKs escape them (`a%2Fb`). Who
sends `anthropic-version` is answered in the shape of Anthropic's API. As long as no engine has listed its models, one
of them is asked; a name that none lists is looked for as in `stages.match`. An upgrade to a WebSocket is refused
but for the path that has them: clients fall back at once, while an engine's refusal of a GET reads like a failure. Who
asks for a path with too little or too much before it is told which one he means.
"""

from __future__ import annotations

from collections.abc import Callable
from email.utils import formatdate
from urllib.parse import unquote_to_bytes

import orjson

from ranvier_py.core.access.identity import ANYBODY
from ranvier_py.core.engine_cache.sources.engine_polls import PROBE_FIELD
from ranvier_py.core.errors import BadRequest, LoopDetected, MethodNotAllowed, NotFound, UpgradeRefused
from ranvier_py.core.routing.models.model_list import card_of, model_list
from ranvier_py.core.routing.request_paths import CHAT_PATH, COMPLETION_PATH, PATHS, REALTIME_PATH, meant_path
from ranvier_py.proxy.admission.request_target import misleads
from ranvier_py.proxy.call import Call
from ranvier_py.proxy.driver import Steps
from ranvier_py.proxy.http_values import Fields
from ranvier_py.proxy.stages.resolve_model import ResolveStage, tenant_of

MODELS_PATH = b"/v1/models"
ONE_MODEL = MODELS_PATH + b"/"
HEALTH_PATH = b"/health"
ALIVE = frozenset((HEALTH_PATH, b"/", b"/api/hello"))  # the latter two are what agents try before they begin
NO_SUCH_PATH = "no such path: this port serves /health, /v1/ and paths of engines' inference, such as /generate"


def answer_ourselves(resolve: ResolveStage, own_probe: bytes, call: Call) -> Steps[None] | None:
    """Answer what no backend has to. Raises RequestError, also for a probe of this node itself."""
    registry, path, identity = resolve.models.registry, call.request.path, call.identity
    is_get = call.request.method in (b"GET", b"HEAD") and not call.request.fields.upgrades
    may_use = identity.may_use if identity is not None and identity.is_limited_to_models else None
    if is_get and path.startswith(ONE_MODEL) and (registry.pools.names.listed or may_use is not None):
        return answer_one(resolve, call, unquote_to_bytes(path[len(ONE_MODEL) :]).decode("utf-8", "replace"))
    body = own_answer(resolve, call, may_use)
    if path == HEALTH_PATH and any(name.lower() == PROBE_FIELD and own_probe == v for name, v in call.request.headers):
        raise LoopDetected("a backend of this node is the node itself")
    if body is not None:
        answer(call, body, ((b"date", formatdate(usegmt=True).encode()),) if path in ALIVE else ())
    return None


def answer(call: Call, body: bytes, fields: Fields = ()) -> None:
    call.status = 200
    call.client.respond(200, body, fields)
    call.outcome = "success"


def answer_one(resolve: ResolveStage, call: Call, name: str) -> Steps[None]:
    """Answer with the card of one model. Raises ModelNotFound."""
    registry, claude = resolve.models.registry, call.request.fields.is_anthropic
    may_use = call.identity.may_use if call.identity is not None else ANYBODY.may_use
    table, tenant = resolve.table, tenant_of(call.identity)
    alias = table.card_of(name, registry.pools.names.listed, tenant) if table is not None else ""
    is_allowed = may_use(name) or (alias != "" and may_use(alias))
    card = card_of(registry, name, alias, claude=claude) if is_allowed else None
    if card is None and is_allowed and registry.pools.names.lacks(registry, name):
        yield from resolve.models.sought(name)
        card = card_of(registry, name, claude=claude)
    if card is None:
        raise resolve.missing(name, call.identity)
    answer(call, orjson.dumps(card))


def own_answer(resolve: ResolveStage, call: Call, may_use: Callable[[str], bool] | None) -> bytes | None:
    """Return the body of what the node answers itself; None for what goes to a backend. Raises RequestError. `may_use`:
    models, if not all."""
    request = call.request
    path, method = request.path, request.method
    of_v1 = path.startswith(b"/v1/")
    if request.fields.upgrades and method == b"GET" and path != REALTIME_PATH:
        raise UpgradeRefused("only /v1/realtime has WebSockets; this takes requests of HTTP/1.1")
    if path in PATHS and (method == b"POST" or path in (CHAT_PATH, COMPLETION_PATH) or not of_v1):
        if method not in (b"POST", b"OPTIONS"):  # OPTIONS: for CORS
            raise MethodNotAllowed(f"{path.decode()} takes POST")
        return None
    if method in (b"GET", b"HEAD"):
        if path in ALIVE:
            return b'{"status":"ok"}'
        if path == MODELS_PATH:
            backends, table = resolve.models.registry, resolve.table
            listed, tenant = backends.pools.names.listed, tenant_of(call.identity)
            aliases = table.shown(listed, tenant) if table is not None else {}
            found = model_list(backends, aliases, claude=request.fields.is_anthropic, may_use=may_use)
            return None if found is None else orjson.dumps(found)
    if not of_v1 or path.startswith(b"/v1/v1/"):
        known = meant_path(path)
        raise NotFound(
            f"{NO_SUCH_PATH}; {known.decode()} is what the base URL should lead to" if known else NO_SUCH_PATH
        )
    if misleads(path):
        raise BadRequest("the path has dot segments, or encodes slashes or control characters")
    return None
