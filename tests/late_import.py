"""Libraries that take seconds to import, for the few tests that use them: each worker imports every file of tests."""

from importlib import import_module
from typing import Any


class Late:
    """A module that is imported once something public of it is asked for: pytest asks everything for `__wrapped__`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(import_module(self.name), name)
