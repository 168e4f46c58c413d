"""The models of one engine: its base, adapters that come and go at run time, and what its pages say of them.

vLLM names an adapter by its own name and lists the paths that it serves in its OpenAPI document; SGLang names one
`base:adapter`, reads any other name as its base, and says on a page of its own whether its model generates.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any

import orjson

from cluster.engine.engine_api import ApiError, bad_request, models_body, read_object
from ranvier_py.proxy.client import Client
from ranvier_py.proxy.http_values import HttpRequest

Route = Callable[[HttpRequest, Client], Awaitable[None]]

VLLM, SGLANG = "vllm", "sglang"


class EngineModels:
    """The names that one engine serves. `embeds`: it was started for embeddings, and generates nothing."""

    def __init__(self, names: Sequence[str], owner: str, *, embeds: bool) -> None:
        self.base, self.owner, self.embeds = names[0], owner, embeds
        self.adapters = {name: f"/adapters/{name}" for name in names[1:]}  # with the paths of their weights

    def adapter_of(self, model: str) -> str:
        """Return the adapter that a request names, "" for the base. Raises ApiError for what is not loaded."""
        if self.owner == SGLANG:
            if self.embeds:
                raise bad_request("This model does not appear to be a generation model")
            adapter = model.partition(":")[2]
            if adapter and adapter not in self.adapters:
                raise bad_request(f"The following requested LoRA adapters are not loaded: {{'{adapter}'}}")
            return adapter
        if model != self.base and model not in self.adapters:
            raise ApiError(404, "NotFoundError", f"The model `{model}` does not exist.", "model")
        return "" if model == self.base else model

    def listed(self, created: int, tokens_max: int) -> bytes:
        return models_body([self.base, *self.adapters], created, tokens_max, self.owner)

    def routes(self, served: Iterable[tuple[bytes, bytes]]) -> dict[tuple[bytes, bytes], Route]:
        """Return the routes for adapters, and the page that says what it serves: all paths of `served`."""
        prefix = b"" if self.owner == SGLANG else b"/v1"
        page = {"model_path": self.base, "is_generation": not self.embeds}
        if self.owner == VLLM:
            page = {
                "openapi": "3.1.0",
                "paths": {path.decode(): {method.decode().lower(): {}} for method, path in served},
            }
        return {
            (b"POST", prefix + b"/load_lora_adapter"): self.load,
            (b"POST", prefix + b"/unload_lora_adapter"): self.unload,
            (b"GET", b"/openapi.json" if self.owner == VLLM else b"/get_model_info"): partial(self.show, page),
        }

    async def show(self, page: dict[str, Any], _: HttpRequest, client: Client) -> None:
        client.respond(200, orjson.dumps(page))

    async def load(self, request: HttpRequest, client: Client) -> None:
        fields = read_object(request.body)
        name, path = str(fields.get("lora_name") or ""), str(fields.get("lora_path") or "")
        if not name or not path or name in self.adapters:
            raise bad_request(f"The lora adapter '{name}' has already been loaded, or has no name or path.")
        self.adapters[name] = path
        self._respond(client, f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: HttpRequest, client: Client) -> None:
        name = str(read_object(request.body).get("lora_name") or "")
        if name not in self.adapters:
            raise ApiError(404, "NotFoundError", f"The lora adapter '{name}' cannot be found.")
        del self.adapters[name]
        self._respond(client, f"Success: LoRA adapter '{name}' removed successfully.")

    def _respond(self, client: Client, words: str) -> None:
        body = {"success": True, "error_message": "", "loaded_adapters": self.adapters}
        client.respond(200, orjson.dumps(body) if self.owner == SGLANG else words.encode())
