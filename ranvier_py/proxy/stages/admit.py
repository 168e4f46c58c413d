"""Lets a request use the model that it names, if its key may; for others it is as if there were no such model.

Rule: for a key of some models a body must name its model once, since engines differ in which of two counts. Where none
is known, because a body can't be read or names none, such a key may ask only while it may use all that engines list.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from trio.lowlevel import checkpoint

from ranvier_py.core.access.identity import Identity
from ranvier_py.core.errors import BadRequest
from ranvier_py.core.prompts.outer_members import is_doubled
from ranvier_py.core.prompts.reserved_members import OVERLAP_BYTES, SLICE_BYTES, escaped_name_in
from ranvier_py.core.routing.models.model_names import ModelNames
from ranvier_py.proxy.call import Call, ReadRequest
from ranvier_py.proxy.driver import Steps
from ranvier_py.proxy.stages.resolve_model import ResolveStage

ASKING = frozenset((b"POST", b"PUT", b"PATCH"))
"""Methods that may have an engine use a model; so may an upgrade."""

MODEL = "model"
MEMBER, FIELD = re.compile(rb'"model"'), re.compile(rb"name\*?[ \t]*=[ \t]*[\"']?(?:utf-8'')?model\b", re.IGNORECASE)
NAMED_BY_QUERY = re.compile(rb"[?&]model=")
FOR_SOME = "this key is for some models: the request must name one of them, once, in a body that can be read"


@dataclass(slots=True)
class AdmitStage:
    resolve: ResolveStage

    def __call__(self, call: Call) -> Steps[None] | None:
        """Raise ModelNotFound or BadRequest if the key may not use the model."""
        identity, read, names = call.identity, call.read, self.resolve.models.registry.pools.names
        if identity is None or not identity.is_limited_to_models:
            return None
        model = read.prompt.model
        if model:
            if not call.may_use(model):
                raise self.resolve.missing(asked_in(call), identity)
            return None if may_use_all(identity, names) else named_once(read)
        if (call.request.method in ASKING or read.upgrades) and not may_use_all(identity, names):
            raise BadRequest(FOR_SOME)
        return None


def may_use_all(identity: Identity, names: ModelNames) -> bool:
    return bool(names.listed) and all(map(identity.may_use, names.listed))


def may_go_on(identity: Identity, models: Sequence[str], names: ModelNames) -> bool:
    """Whether what was asked for by one of these names for its model may go on, or by none, while engines list no
    other."""
    if not identity.is_limited_to_models:
        return True
    return any(map(identity.may_use, models)) if models else all(map(identity.may_use, names.listed))


def asked_in(call: Call) -> str:
    """Return the model as the client has named it."""
    return call.named.asked if call.named is not None else call.read.prompt.model


def named_once(read: ReadRequest) -> Steps[None]:
    """Raise BadRequest if a request names its model more than once, or may do so."""
    request, body = read.request, read.request.body
    if len(NAMED_BY_QUERY.findall(request.target)) > 1:
        raise BadRequest(FOR_SOME)
    if not (read.prompt.unread or request.fields.multipart):
        try:
            doubled = is_doubled(body, (MODEL,))
        except (ValueError, RecursionError):
            doubled = True
        if doubled:
            raise BadRequest(FOR_SOME)
        return
    found, token = 0, FIELD if request.fields.multipart else MEMBER
    for start in range(0, len(body), SLICE_BYTES):
        piece = body[start : start + SLICE_BYTES + OVERLAP_BYTES]
        found += sum(each.start() < SLICE_BYTES for each in token.finditer(piece))
        if found > 1 or (b"\\u00" in piece and escaped_name_in(piece, {MODEL.encode(): MODEL})):
            raise BadRequest(FOR_SOME)
        if len(body) > SLICE_BYTES:
            yield checkpoint
