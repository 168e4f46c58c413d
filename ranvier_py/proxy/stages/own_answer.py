"""What a node answers by itself: its health, the models that it serves, and what no engine behind it can do.

Rules: one model is found however its id is spelled in a path, with its slashes or as SDKs escape them (`a%2Fb`). Who
sends `anthropic-version` is told of models, and that one is missing, in the shape of Anthropic's API. As long as no
engine has listed its models, one of them is asked. An upgrade to a WebSocket is refused but for the path that has them:
clients fall back at once, while an engine's refusal of a GET reads like a failure. Who asks for a path with too little
or too much before it is told which one he means.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import unquote_to_bytes

import orjson

from ranvier_py.core.errors import BadRequest, MethodNotAllowed, ModelNotFound, NotFound, UpgradeRefused
from ranvier_py.core.routing.backend import Backend
from ranvier_py.core.routing.model_list import card_of, model_list
from ranvier_py.core.routing.request_paths import CHAT_PATH, COMPLETION_PATH, PATHS, REALTIME_PATH, meant_path
from ranvier_py.proxy.admission.request_target import misleads
from ranvier_py.proxy.call import Call
from ranvier_py.proxy.client import Client
from ranvier_py.proxy.error_answers import api_of
from ranvier_py.proxy.http_values import HttpRequest

MODELS_PATH = b"/v1/models"
ONE_MODEL = MODELS_PATH + b"/"
ALIVE = frozenset((b"/health", b"/", b"/api/hello"))  # the latter two are what agents try before they begin
NO_SUCH_PATH = "no such path: this port serves /health, /v1/ and paths of engines' inference, such as /generate"


def answer_ourselves(backends: Iterable[Backend], call: Call) -> None:
    """Answer what no backend has to. Raises RequestError."""
    body = own_answer(backends, call.request, call.client)
    if body is not None:
        call.status = 200
        call.client.respond(200, body)
        call.outcome = "success"


def own_answer(backends: Iterable[Backend], request: HttpRequest, client: Client) -> bytes | None:
    """Return the body of what the node answers itself; None for what goes to a backend. Raises RequestError."""
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
        found = models_answer(backends, request, client) if path.startswith(MODELS_PATH) else None
        if found is not None:
            return found
    if not of_v1 or path.startswith(b"/v1/v1/"):
        known = meant_path(path)
        client.api = api_of(known) if known else client.api
        raise NotFound(
            f"{NO_SUCH_PATH}; {known.decode()} is what the base URL should lead to" if known else NO_SUCH_PATH
        )
    if misleads(path):
        raise BadRequest("the path has dot segments, or encodes slashes or control characters")
    return None


def models_answer(backends: Iterable[Backend], request: HttpRequest, client: Client) -> bytes | None:
    """Return the list of models, or one of them; None if that is not asked for, or no backend has listed its own.
    Raises ModelNotFound."""
    path = request.path
    claude = any(name.lower() == b"anthropic-version" for name, _ in request.headers)
    client.api = "anthropic" if claude else client.api
    if path == MODELS_PATH:
        models = model_list(backends, claude=claude)
        return None if models is None else orjson.dumps(models)
    if not path.startswith(ONE_MODEL) or all(not backend.cards for backend in backends):
        return None
    name = unquote_to_bytes(path[len(ONE_MODEL) :]).decode("utf-8", "replace")
    card = card_of(backends, name, claude=claude)
    if card is None:
        raise ModelNotFound(f"The model `{name}` does not exist")
    return orjson.dumps(card)
