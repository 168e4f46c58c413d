"""What each bias of predictions means for an operator: the finding that names it."""

from __future__ import annotations

from types import MappingProxyType

from ranvier_py.core.engine_cache.calibration.biases import Bias
from ranvier_py.core.engine_cache.calibration.predictions import BackendPredictions
from ranvier_py.core.findings import Finding, Severity

PREDICTIONS = "engine_predictions"
MISTAKES = (Bias.TEMPLATE, Bias.NO_REUSE, Bias.EVENTS, Bias.PROFILE)
"""Of the operator, most likely: predictions are worth little until they are mended."""

BIASES = MappingProxyType(
    {
        Bias.TEMPLATE: (
            "engine_tokenizer",
            "our tokenizer or chat template does not fit it, by its counts of prompts",
            "Set tokenizer and chat_template to those of its model; ranvier config --check loads them.",
        ),
        Bias.NO_REUSE: (
            "engine_reuses_nothing",
            "nothing was cached of nearly all prompts used moments ago",
            "See whether it has prefix caching on, and whether its counts of cached tokens are real.",
        ),
        Bias.EVENTS: (
            PREDICTIONS,
            "its answers do not fit its KV events",
            "See whether kv_events names the port of another engine.",
        ),
        Bias.PROFILE: (
            PREDICTIONS,
            "its cache is not what its profile promises",
            "Set kv_profile of this backend to what its engine has.",
        ),
        Bias.SALT: (
            PREDICTIONS,
            "some prompts used moments ago had nothing cached: a tenant, an adapter or a header parts them",
            "Name what parts them: tenant_isolation, or models of their own.",
        ),
        Bias.HYBRID: (
            PREDICTIONS,
            "it reuses prefixes in steps of hundreds of tokens, as hybrid models do",
            "Nothing: it is learned. kv_profile names it from the start.",
        ),
        Bias.BLOCK_SIZE: (
            PREDICTIONS,
            "its blocks are larger than ours",
            "Set block_size_tokens to its block size.",
        ),
        Bias.SMALL_CACHE: (
            PREDICTIONS,
            "it keeps less than its cache has room for",
            "See who else uses it; else nothing: the capacity is learned.",
        ),
        Bias.NO_COUNTS: (
            PREDICTIONS,
            "most of its answers do not report cached tokens",
            "Start it with --enable-prompt-tokens-details (vLLM) or --enable-cache-report (SGLang).",
        ),
    }
)
"""What each bias means for an operator: kind of its finding, words, remedy."""


def bias_finding(bias: Bias, known: BackendPredictions, name: str) -> Finding:
    """Return what an operator can do about one way in which predictions for an engine are wrong."""
    kind, words, remedy = BIASES[bias]
    detail, whom = known.detail_of(bias), "hits: what it holds is predicted wrongly"
    what = f"engine {name}: {words}" + (f" ({detail})" if detail else "")
    severity = Severity.DEGRADED if bias in MISTAKES else Severity.NOTICE
    about = name if kind != "engine_predictions" else f"{name}: {bias.value}"
    return Finding(
        kind, severity, what, about=about, whom=whom, remedy=remedy, command=f"ranvier status --engine {name}"
    )
