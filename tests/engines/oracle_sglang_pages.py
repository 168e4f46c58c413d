"""The pages of SGLang's own HTTP server by which a node knows what it serves, without engine or model.

    PYTHONPATH=. .venv-sglang/bin/python tests/engines/oracle_sglang_pages.py

One record for a model that generates and one for a model of embeddings: [the body of /v1/models, the body of
/get_model_info]. What the server asks of its engine is a mock.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import msgspec

import tests.engines.oracle_sglang  # noqa: F401  # isort: skip  # has a stand-in for torchvision

from sglang.srt.entrypoints import http_server
from starlette.testclient import TestClient

OPTIONS = SimpleNamespace(tokenizer_path="m", preferred_sampling_params=None, enable_lora=False)
for name in ("get_serving", "get_lora"):
    setattr(
        http_server,
        name,
        lambda: SimpleNamespace(tokenizer_path="m", preferred_sampling_params=None, enable_lora=False),
    )


def main() -> None:
    for generates in (True, False):
        manager = MagicMock(model_path="m", served_model_name="m", is_generation=generates)
        manager.config_value = lambda _: None
        config = SimpleNamespace(model_type="llama", architectures=["LlamaForCausalLM"])
        manager.model_config = SimpleNamespace(
            context_len=4096,
            is_image_understandable_model=False,
            is_audio_understandable_model=False,
            hf_config=config,
        )
        http_server.set_global_state(SimpleNamespace(tokenizer_manager=manager))
        client = TestClient(http_server.app)
        record = msgspec.msgpack.encode([client.get(path).content for path in ("/v1/models", "/get_model_info")])
        sys.stdout.buffer.write(len(record).to_bytes(4, "big") + record)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
