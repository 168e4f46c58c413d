"""Lets a request use the model that it names, if its key may; for others it is as if there were no such model.

Rule: for a key of some models a body must name its model once, since engines differ in which of two counts, and an
adapter beside it, as SGLang takes it, must be one of its models, too. Where none is known, because a body can't be read
or names none, such a key may ask only while it may use all that engines list.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from trio.lowlevel import checkpoint

from ranvier_py.core.access.identity import Identity
from ranvier_py.core.errors import BadRequest
from ranvier_py.core.prompts.outer_members import is_doubled
from ranvier_py.core.prompts.outer_values import OuterValues, Scalar
from ranvier_py.core.prompts.reserved_members import OVERLAP_BYTES, SLICE_BYTES, escaped_name_in, has_member
from ranvier_py.core.routing.models.model_names import ModelNames
from ranvier_py.proxy.call import Call, ReadRequest
from ranvier_py.proxy.driver import Steps, in_portions
from ranvier_py.proxy.stages.resolve_model import ResolveStage

ASKING = frozenset((b"POST", b"PUT", b"PATCH"))
"""Methods that may have an engine use a model; so may an upgrade."""

MODEL, ADAPTER = "model", "lora_path"
NAMED = {name.encode(): name for name in (MODEL, ADAPTER)}
MEMBER, FIELD = re.compile(rb'"model"'), re.compile(rb"name\*?[ \t]*=[ \t]*[\"']?(?:utf-8'')?model\b", re.IGNORECASE)
NAMED_BY_QUERY = re.compile(rb"[?&]model=")
FOR_SOME = "this key is for some models: the request must name one of them, once, in a body that can be read"
OTHER_ADAPTER = f"this key is for some models: {ADAPTER} must name one of them"


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
            return None if may_use_all(identity, names) else named_once(read, identity)
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


def named_once(read: ReadRequest, identity: Identity) -> Steps[None]:
    """Raise BadRequest if a request names its model more than once, or an adapter that is not to be used, or may do
    so."""
    request, body = read.request, read.request.body
    if len(NAMED_BY_QUERY.findall(request.target)) > 1:
        raise BadRequest(FOR_SOME)
    if not (read.prompt.unread or request.fields.multipart):
        try:
            doubled = is_doubled(body, (MODEL, ADAPTER))
        except (ValueError, RecursionError):
            doubled = True
        if doubled:
            raise BadRequest(FOR_SOME)
        values = OuterValues(body)
        place = yield from in_portions(values.last_place(ADAPTER))
        if place and not may_use_adapter(values.scalar(place), read.prompt.model, identity):
            raise BadRequest(OTHER_ADAPTER)
        return
    found, token = 0, FIELD if request.fields.multipart else MEMBER
    for start in range(0, len(body), SLICE_BYTES):
        piece = body[start : start + SLICE_BYTES + OVERLAP_BYTES]
        found += sum(each.start() < SLICE_BYTES for each in token.finditer(piece))
        if found > 1 or (b"\\u00" in piece and escaped_name_in(piece, NAMED)):
            raise BadRequest(FOR_SOME)
        if has_member(piece, ADAPTER.encode()):
            raise BadRequest(OTHER_ADAPTER)
        if len(body) > SLICE_BYTES:
            yield checkpoint


def may_use_adapter(named: Scalar | None, model: str, identity: Identity) -> bool:
    """Whether a key may use an adapter as its model, or as one of that model; None is what no name can be."""
    if named is None or type(named.value) is not str:
        return named is not None and named.value is None
    return identity.may_use(named.value) or identity.may_use(f"{model}:{named.value}")
