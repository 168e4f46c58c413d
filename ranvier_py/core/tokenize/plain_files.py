"""Whether a folder's `tokenizer.json` is all there is to a model's tokenizer, so that tokenizers alone can load it.

transformers makes classes of its own for many models, corrects files of some, and adds tokens that other files name.
Rule: a folder is plain only if none of this can change a token, as far as its files show: it names the general class,
sets what is known to be of no effect, and has the special tokens of `tokenizer.json`. Else transformers loads it.
Invariant: a plain folder's tokens, special tokens and templates are those of transformers (test_plain_files.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GENERAL_CLASSES = frozenset(("PreTrainedTokenizerFast", "TokenizersBackend"))
"""Both mean: as tokenizer.json has it."""

GENERAL_MODELS = frozenset(("llama",))
"""Values of `model_type` in config.json to which transformers gives no other class and no correction."""

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

OTHER_KEYS = frozenset(
    (
        *("tokenizer_class", "chat_template", "added_tokens_decoder", "add_bos_token", "add_eos_token", "backend"),
        *("is_local", "clean_up_tokenization_spaces", "model_input_names", "model_max_length", "padding_side"),
        "truncation_side",
    )
)
"""Of tokenizer_config.json: read below, overridden by tokenizer.json, or of no effect on what is encoded."""


ADDED_TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")

AddedTokens = Mapping[str, Mapping[str, Any]]
"""Number of a token -> these fields, as `added_tokens_decoder` has them."""


@dataclass(frozen=True, slots=True)
class PlainFiles:
    """What a plain folder has besides its vocabulary, in the form in which transformers shows it."""

    special_tokens_map: Mapping[str, str]
    chat_template: str | Mapping[str, str] | None
    declared: AddedTokens | None

    def fit(self, added: AddedTokens) -> bool:
        """Whether they add no token to those of `tokenizer.json`, and change none."""
        known = {token["content"] for token in added.values() if token["special"]}
        return self.declared in (None, added) and known.issuperset(self.special_tokens_map.values())


def plain_files(settings: Any, model: Any, *, template: str | None = None, older: bool = False) -> PlainFiles | None:
    """Return what a folder has besides its vocabulary, None if that alone shows that it is not plain.

    Args:
        settings: the content of tokenizer_config.json.
        model: the content of config.json, {} if there is none.
        template: the content of chat_template.jinja, if there is one; it counts before that of the settings.
        older: whether there are files in which older releases kept special and added tokens.
    """
    if not isinstance(settings, dict) or not isinstance(model, dict):
        return None
    special = {name: settings[name] for name in SPECIAL_TOKENS if settings.get(name) is not None}
    declared: AddedTokens | None = settings.get("added_tokens_decoder")
    templates: Any = settings.get("chat_template")
    if isinstance(templates, list):
        templates = named_templates(templates) or templates
    is_plain = (
        settings.get("tokenizer_class") in GENERAL_CLASSES
        and settings.keys() <= OTHER_KEYS | set(SPECIAL_TOKENS)
        and (not model or model.get("model_type") in GENERAL_MODELS)
        and all(isinstance(token, str) for token in special.values())
        and not (older and declared is None)
        and isinstance(templates, str | dict | None)
    )
    return PlainFiles(special, templates if template is None else template, declared) if is_plain else None


def named_templates(items: Sequence[Any]) -> dict[str, str]:
    """Return the texts of a list of templates by name, {} if it is no such list."""
    if not all(isinstance(item, dict) and item.keys() >= {"name", "template"} for item in items):
        return {}
    return {item["name"]: item["template"] for item in items if isinstance(item["template"], str)}
