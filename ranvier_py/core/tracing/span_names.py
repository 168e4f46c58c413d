"""The names of attributes, by version of OpenTelemetry's conventions: option `otel_semconv`.

`1.44`: the last release that has GenAI; `genai-main`: the repository that they moved to, which renames some before its
first release. Attributes of HTTP are stable and the same in both; what has no convention begins with `ranvier.`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

RELEASED, GENAI_MAIN = "1.44", "genai-main"
VERSIONS = (RELEASED, GENAI_MAIN)

SCHEMA = {RELEASED: "https://opentelemetry.io/schemas/1.44.0", GENAI_MAIN: ""}
"""URL of the schema that spans name; the unreleased one has none."""

GENAI: Mapping[str, str] = MappingProxyType(
    {
        "operation": "gen_ai.operation.name",
        "provider": "gen_ai.provider.name",
        "request_model": "gen_ai.request.model",
        "stream": "gen_ai.request.stream",
        "input_tokens": "gen_ai.usage.input_tokens",
        "output_tokens": "gen_ai.usage.output_tokens",
        "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
        "written_tokens": "gen_ai.usage.cache_creation.input_tokens",
        "first_chunk_s": "gen_ai.response.time_to_first_chunk",
    }
)

NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        RELEASED: GENAI,
        GENAI_MAIN: MappingProxyType({**GENAI, "written_tokens": "gen_ai.usage.cache_write.input_tokens"}),
    }
)

OPERATIONS = {
    "chat": "chat",
    "messages": "chat",
    "responses": "chat",
    "completion": "text_completion",
    "generate": "text_completion",
    "embeddings": "embeddings",
}
"""gen_ai.operation.name by the API of a request; of others it is the last part of the path."""
