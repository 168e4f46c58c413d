"""What a request must be where tenants are kept apart.

Invariant: nothing of one tenant reaches another (test_stored_apart.py, test_tenants_apart.py). Rules: what leads to
anything that engines keep names a response by an id that has an owner, in its path or in its body, or is refused. A
body is read as engines read it, or is refused: no form for JSON, no other encoding, no compression. What an engine
would keep under a name that the client chose is refused, too.
"""

from __future__ import annotations

from trio.lowlevel import checkpoint

from ranvier_py.core.errors import BadRequest, MethodNotAllowed, NotFound
from ranvier_py.core.prompts.outer_members import is_doubled
from ranvier_py.core.prompts.prompt import Prompt
from ranvier_py.core.prompts.reserved_members import ID_MEMBERS, SLICE_BYTES, STORED_MEMBERS, BodySearch, slices
from ranvier_py.core.prompts.tenants import Tenants, demand_object
from ranvier_py.core.routing.request_paths import FORM_PATHS, PATHS, REALTIME_PATH
from ranvier_py.core.routing.stored_paths import is_strange, may_name
from ranvier_py.proxy.driver import Steps
from ranvier_py.proxy.http_values import HttpRequest

APART = "tenants are kept apart here"
RESPONSE_ID, CONVERSATION = STORED_MEMBERS
KEPT_NAMES = (*STORED_MEMBERS, ID_MEMBERS[0])


def tenant_of(tenants: Tenants, request: HttpRequest) -> bytes:
    """Return the tenant of the prompt; empty for a request without one. Raises RequestError."""
    method, path, fields = request.method, request.path, request.fields
    if is_strange(method, path):
        raise NotFound(f"{APART}: which tenant owns what this path leads to is not known; it is for responses alone")
    if path in PATHS and path != REALTIME_PATH and method not in (b"POST", b"OPTIONS"):  # it could list what all made
        raise MethodNotAllowed(f"{path.decode()} takes POST")
    if method != b"POST" or not request.body:
        return b""
    takes_json = (path in PATHS and path not in FORM_PATHS) or may_name(method, path)
    if fields.multipart and not takes_json and request.body.lstrip().startswith(b"--"):
        return b""
    if fields.multipart:
        raise BadRequest(f"{APART}: a form is not read here, the body must be JSON")
    if not fields.readable:
        raise BadRequest(f"{APART}: the body must not be compressed")
    if takes_json:
        demand_object(request.body)
    return tenants.of(request.headers)


def check_names(tenants: Tenants | None, request: HttpRequest, prompt: Prompt) -> Steps[None]:
    """Raise BadRequest if the body names, or may name, what an engine keeps, other than a response with an owner. Only
    where tenants are kept apart."""
    if tenants is None or not may_name(request.method, request.path):
        return
    found = prompt.reserved
    if found is None:
        yield from _search(request.body)
        return
    if CONVERSATION in found.stored:
        raise BadRequest(f"{APART}: which tenant owns a {CONVERSATION} is not known")
    if RESPONSE_ID in found.stored and not prompt.previous:
        raise BadRequest(f"{RESPONSE_ID} must be a text")
    if found.own_id:
        raise BadRequest(f"{APART}: {ID_MEMBERS[0]} would name the response, and could replace another one")
    try:
        doubled = is_doubled(request.body, KEPT_NAMES)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{APART}: the body cannot be read") from error
    if doubled:
        raise BadRequest(f"{APART}: one of {', '.join(KEPT_NAMES)} stands twice")


def _search(body: bytes) -> Steps[None]:
    search = BodySearch(KEPT_NAMES, form=False)
    for piece in slices(body):
        if name := search.find(piece):
            raise BadRequest(f"{APART}: this body is too large to be read, and may have a {name}")
        if len(body) > SLICE_BYTES:
            yield checkpoint
