"""SGLang's own reading of request bodies, without engine or model: the tokens that each becomes.

    PYTHONPATH=. .venv-sglang/bin/python tests/engines/oracle_sglang_chats.py FILE TOKENIZER

FILE has a line of JSON for each body: [api, body]. One record is written for each: [tokens], or [null, error].
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import transformers

from tests.engines.oracle_requests import Requests  # isort: skip
import tests.engines.oracle_sglang  # noqa: F401  # isort: skip  # has a stand-in for torchvision

from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.openai import serving_chat
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, ResponsesRequest
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
from sglang.srt.parser.jinja_template_utils import detect_jinja_template_content_format

REASONING_PARSER = "qwen3"  # without any, thinking in a body is an error


class Reader:
    """The parts of SGLang's server that make a prompt of a body; what they ask of an engine is a mock."""

    def __init__(self, tokenizer: Any) -> None:
        manager, templates = MagicMock(tokenizer=tokenizer), MagicMock(chat_template_name=None, reasoning_config=None)
        manager.config_value = {"reasoning_parser": REASONING_PARSER}.get
        manager.model_config.get_default_sampling_params = dict
        manager.model_config.hf_config.model_type = "llama"
        manager.model_config.hf_config.architectures = ["LlamaForCausalLM"]
        templates.jinja_template_content_format = detect_jinja_template_content_format(tokenizer.chat_template)
        templates.jinja_template_may_reorder_tool_results = templates.force_reasoning = False
        templates.python_chat_template = None
        serving_chat.get_serving = lambda: SimpleNamespace(default_chat_template_kwargs=None)
        self.chat = serving_chat.OpenAIServingChat(manager, templates)
        self.messages = AnthropicServing(self.chat)
        self.responses = OpenAIServingResponses.__new__(OpenAIServingResponses)
        self.responses.__dict__.update(self.chat.__dict__)

    def tokens(self, api: str, body: dict[str, Any]) -> Sequence[int]:
        found: Sequence[int] = self.chat._process_messages(getattr(self, f"as_{api}")(body), False).prompt_ids
        return [*found]

    def as_chat(self, body: dict[str, Any]) -> Any:
        return ChatCompletionRequest(**body)

    def as_messages(self, body: dict[str, Any]) -> Any:
        return self.messages._convert_to_chat_completion_request(AnthropicMessagesRequest(**body))

    def as_responses(self, body: dict[str, Any]) -> Any:
        request = ResponsesRequest(**body)
        messages = self.responses._construct_input_messages(request, None)
        tools = self.responses._response_tools_to_chat_tools(request)
        choice = self.responses._chat_tool_choice(request.effective_tool_choice()) if tools else "none"
        return ChatCompletionRequest(model=request.model, messages=messages, tools=tools or None, tool_choice=choice)


def main() -> None:
    file, tokenizer = sys.argv[1:]
    output = Requests(argparse.Namespace(seed=1, block_size=16), ())
    reader = Reader(transformers.AutoTokenizer.from_pretrained(tokenizer))
    for line in Path(file).read_text().splitlines():
        api, body = json.loads(line)
        try:
            output.write([reader.tokens(api, body)])
        except ValueError as error:
            output.write([None, str(error)])
    output.output.flush()


if __name__ == "__main__":
    main()
