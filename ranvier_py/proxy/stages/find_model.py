"""Has a request wait while engines are asked whether one has loaded a model that none has listed."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from ranvier_py.core.routing.backends import Registry
from ranvier_py.proxy.call import Call
from ranvier_py.proxy.driver import Steps


@dataclass(slots=True, eq=False)
class ModelStage:
    registry: Registry
    look_for: Callable[[str], Awaitable[None]]  # returns once the model was found, or won't be

    def __call__(self, call: Call) -> Steps[None] | None:
        model, names = call.read.prompt.model, self.registry.pools.names
        if not model or not names.listed or model in names.listed:
            return None
        return self.sought(model) if names.lacks(self.registry, model) else None

    def sought(self, model: str) -> Steps[None]:
        yield partial(self.look_for, model)
