"""Applies the operator's rules for clients to a body (`core/clients/`)."""

from collections.abc import Sequence
from dataclasses import dataclass

from ranvier_py.core.clients.body_mender import BodyMender, Engines, Mended
from ranvier_py.core.clients.known_clients import USER_AGENT
from ranvier_py.core.prompts.request_apis import APIS
from ranvier_py.core.routing.backends import Registry
from ranvier_py.core.routing.request_paths import PATHS
from ranvier_py.proxy.http_values import HttpRequest


@dataclass(slots=True, eq=False, repr=False)
class MendStage:
    mender: BodyMender | None  # None if no rule is on
    registry: Registry

    def __call__(self, path: bytes, request: HttpRequest, mender: BodyMender | None = None) -> Mended | None:
        """Apply the rules. Returns None if the body stays as it came."""
        mender, rule = mender or self.mender, PATHS.get(path)
        api = APIS.get(rule.reader) if rule is not None else None
        if mender is None or api is None:
            return None
        agent = next((value for name, value in request.headers if name.lower() == USER_AGENT), b"")
        client, session = request.fields.client, request.fields.session
        engines = self.registry.pools.engines
        return mender.mend(request.body, api, client, agent, session, lambda model: Engines(*engines(model)))

    def body_as_read(self, path: bytes, body: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
        """Return the body of which fingerprints would be made: the one that the rules make of this."""
        if self.mender is None:
            return body
        mended = self(path, HttpRequest(b"POST", path, list(headers), body), self.mender.forgetful())
        return body if mended is None else mended.body
