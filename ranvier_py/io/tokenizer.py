"""Turns chats into token ids, with tokenizers and jinja2, in worker threads; transformers loads what is not plain.

The template renders the text, and the tokenizer encodes it, both as the engines use them: rendered text is encoded
without added special tokens (templates print their own), plain prompts of /v1/completions with them, as vLLM does.

Rules: synchronous and safe to call from several threads; nothing is remembered between calls; texts are encoded in
batches that release the interpreter lock, never in the library's thread pool. The event loop never calls this.
Invariant: tokenize(start) + tokenize_tail(rest) equals tokenize(whole), or the tail is None (test_tokenizer.py).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from tokenizers import Tokenizer

from ranvier_py.core.errors import ConfigError, TemplateRefused, causes, words_of
from ranvier_py.core.log_events import event
from ranvier_py.core.prompts.boundaries import (
    Chat,
    Message,
    TailJob,
    TokenIds,
    TokenizedChat,
    ends_by_estimate,
    ends_by_markers,
    ends_by_offsets,
    ends_by_pieces,
)
from ranvier_py.core.prompts.template_probe import SHOWS_NOTHING, TemplateProbe
from ranvier_py.core.prompts.template_source import compared_texts, read_variables
from ranvier_py.core.prompts.templates import (
    Pieces,
    TemplateProfile,
    chat_pieces,
    content_length,
    normalise,
    prefix_ends,
    stable_count,
    tail_pieces,
)
from ranvier_py.core.tokenize.plain_files import ADDED_TOKEN_FIELDS, plain_files
from ranvier_py.core.tokenize.template_language import compile_template
from ranvier_py.core.tokenize.tokenize_job import TokenizerFacts
from ranvier_py.core.tokenize.tokenizer_probe import PROBE_CHAT, PROBE_TEXT, ProbeTokens

logger = logging.getLogger(__name__)

HUB_ANSWER_S = 5.0
"""A hub that is silent for so long can't be reached. Its library would ask six times for each of a dozen files, with
pauses of up to 8 s: a node without Internet access would start after minutes, though its cache has all files."""

SERVER_ERRORS = 500
"""From this status on the hub itself is in trouble; lower ones mean that it lacks what was asked for."""

EMBEDDED = Path(__file__).parent.parent / "data" / "tokenizer"
RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    KeyError,
    IndexError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What a template may raise for messages that it was not made for."""

MEASURE = (
    "The router reads each conversation once and remembers where its messages end. When the next question arrives, "
    "only the new words are turned into tokens; everything before them is already known. Could you check my "
    "reservation for the 14th of March, please? I paid 249.90 for two seats.\n\ndef longest_prefix(tree, chain):\n    "
    "for depth in reversed(chain):\n        if depth in tree:\n            return tree[depth]\n    return None\n"
    '{"name": "book_flight"}'
)
"""Prose, numbers and code, on which `chars_per_token` is measured."""


class ChatTokenizer:
    """One tokenizer with one chat template.

    `facts` is what a node has to know of the tokenizer; `profile` is what probing found out about the template. Where
    there is a template of its own for chats with tools, `with_tools` renders these, and never turn by turn.
    """

    def __init__(self, tokenizer: Any, template: str | None, identity: str, tool_use: str | None = None) -> None:
        self.with_tools = ChatTokenizer(tokenizer, tool_use, identity) if tool_use else None
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        self._template: jinja2.Template | None = None
        self._variables: frozenset[str] = frozenset()
        self.profile = self._probed(template)
        self.facts = TokenizerFacts(
            identity,
            self.profile.keeps_turns and (self.with_tools is None or self._turns_alike(self.with_tools.profile)),
            self.profile.incremental,
            chars_per_token=self._measured(),
            probe_report=self._report(),
            hoists_system=self.profile.hoists_system,
            reasoning_moves=self.profile.reasoning_moves,
            results=self.profile.results,
            probe=self._probe_tokens(),
        )

    @classmethod
    def load(cls, source: str, *, chat_template: str | None = None) -> ChatTokenizer:
        """Load from `source`: "" or "embedded" is our own, else a directory, else a hub id. Never runs remote code.

        Args:
            chat_template: text of a template, or a path to one, instead of the tokenizer's own.

        Raises ConfigError if it can't be loaded or is no fast tokenizer, or if the template does not compile.
        """
        path = EMBEDDED if source in ("", "embedded") else Path(source)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # our threads batch; a second pool would fight them
        local = path.is_dir()
        tokenizer = (load_plain(path) if local else None) or load_tokenizer(str(path) if local else source, local=local)
        template = read_template(tokenizer, chat_template)
        tool_use = None if chat_template else read_tool_template(tokenizer)
        tokens = path / "tokenizer.json"
        data = tokens.read_bytes() if tokens.is_file() else tokenizer.backend_tokenizer.to_str().encode()
        identity = identity_of(data, (template or "") + (tool_use or ""), tokenizer.special_tokens_map)
        return cls(tokenizer, template, identity, tool_use)

    def tokenize(self, chat: Chat) -> TokenizedChat:
        """Tokenize all messages of a chat. Returns the tokens, and where each message ends.

        Raises TemplateRefused; the prompt can then be routed only by load.
        """
        if self.with_tools is not None and chat.tools is not None:
            return self.with_tools.tokenize(chat)
        ready = self._normalised(chat)
        if not ready.messages:
            raise TemplateRefused("no messages")
        text, pieces = chat_pieces(ready, self.profile, self._render)
        if pieces is not None:
            texts = [piece for piece in pieces if piece is not None]
            return self._joined(pieces, iter(self._encode(texts)), ready.messages)
        found = self._by_text(ready, text)
        return replace(found, ends=self._lasting(list(found.ends), ready.messages))

    def tokenize_tail(self, tail: Sequence[Message], context: Callable[[], Chat], known: int) -> TokenizedChat | None:
        """Tokenize the messages after the first `known` ones; `context()` returns all, and is called if needed.

        Returns None if this chat can't be tokenized incrementally: then tokenize it in full.
        """
        return self.tokenize_tails([TailJob(tail, context, known)])[0]

    def tokenize_tails(self, jobs: Sequence[TailJob]) -> list[TokenizedChat | None]:
        """Do what `tokenize_tail` does for many chats, encoded in one batch."""
        found = [self._tail(job) for job in jobs]
        texts = [text for pieces in found if pieces is not None for text in pieces if text is not None]
        try:
            encoded = iter(self._encode(texts))
        except TemplateRefused:  # one text of the batch is not valid Unicode
            return [None] if len(jobs) == 1 else [self.tokenize_tails([job])[0] for job in jobs]
        return [
            None if pieces is None else self._joined(pieces, encoded, job.tail)
            for job, pieces in zip(jobs, found, strict=True)
        ]

    def tokenize_text(self, text: str, *, bare: bool = False) -> TokenIds:
        """Tokenize a prompt of /v1/completions, with the special tokens that the tokenizer adds unless it is `bare`.
        Raises TemplateRefused."""
        return np.array(self._encode([text], added=not bare)[0], dtype=np.uint32)

    def render(self, chat: Chat, *, generation: bool) -> str:
        """Render a chat to text as the engine does. Raises TemplateRefused."""
        if self.with_tools is not None and chat.tools is not None:
            return self.with_tools.render(chat, generation=generation)
        return self._render(self._normalised(chat), generation=generation)

    def _normalised(self, chat: Chat) -> Chat:
        return Chat([normalise(message, self.profile.parts) for message in chat.messages], chat.tools, chat.template)

    def _tail(self, job: TailJob) -> Pieces | None:
        if self.with_tools is not None and job.context().tools is not None:
            return None
        try:
            return tail_pieces(job.tail, job.context, job.known, self.profile, self._render)
        except TemplateRefused:
            return None

    def _render(self, chat: Chat, *, generation: bool = False) -> str:
        if self._template is None:
            raise TemplateRefused("the tokenizer has no chat template")
        if chat.template.get("chat_template"):
            raise TemplateRefused("the request brings its own chat template")  # as vLLM does unless set to trust it
        arguments = {**chat.template, **(chat.template.get("chat_template_kwargs") or {})}
        try:
            return self._template.render(
                messages=chat.messages,
                tools=chat.tools or None,
                documents=chat.template.get("documents"),
                add_generation_prompt=generation,
                **{**self._special, **{name: arguments[name] for name in arguments if name in self._variables}},
            )
        except RENDER_ERRORS as error:
            raise TemplateRefused(f"{type(error).__name__}: {error}") from error

    def _encode(self, texts: Sequence[str], *, added: bool = False) -> list[list[int]]:
        if not texts:
            return []
        try:
            return [e.ids for e in self._backend.encode_batch_fast(texts, add_special_tokens=added)]
        except (TypeError, UnicodeError) as error:
            raise TemplateRefused("a text is no Unicode") from error
        except Exception as error:  # the library raises nothing more special, such as for a word that it does not know
            raise TemplateRefused(f"the tokenizer can't read a text: {error}") from error

    def _joined(self, pieces: Pieces, encoded: Iterator[list[int]], messages: Sequence[Message]) -> TokenizedChat:
        """Join the tokens of `pieces`, whose texts are the next ones of `encoded`."""
        if len(pieces) == 1:
            ids = next(encoded)
            ends = [len(ids)]
        else:
            parts = [next(encoded) if text is not None else None for text in pieces]
            ids = [token for tokens in parts if tokens for token in tokens]
            ends = ends_by_pieces([-1 if tokens is None else len(tokens) for tokens in parts])
        return TokenizedChat(np.array(ids, dtype=np.uint32), self._lasting(ends, messages), "rendered")

    def _lasting(self, ends: list[int], messages: Sequence[Message]) -> list[int]:
        """Mark ends after reasoning that later turns leave out as unusable (-1)."""
        if self.profile.reasoning_moves:
            stable = stable_count(messages, self.profile.results)
            ends[stable:] = [-1] * (len(ends) - stable)
        return ends

    def _by_text(self, chat: Chat, text: str) -> TokenizedChat:
        """Encode a chat whose template can't be cut into pieces as a whole, and find its ends as well as possible."""
        try:
            encoding = self._backend.encode_batch([text], add_special_tokens=False)[0]
        except Exception as error:  # see `_encode`
            raise TemplateRefused(f"the tokenizer can't read a text: {error}") from error
        ids = np.array(encoding.ids, dtype=np.uint32)
        count = len(chat.messages)
        loose = replace(self.profile, closing=False)
        text_ends = prefix_ends(chat, 0, text, loose, self._render)
        lead = 1 if chat.messages[0]["role"] == "system" else 0  # all templates keep the text before the first turn
        if count == 1 or any(end >= 0 for end in text_ends[lead:-1]):
            ends = ends_by_offsets(encoding.offsets, text_ends)
            return TokenizedChat(ids, [*ends[:-1], len(ids)], "rendered")
        marker = self._backend.token_to_id(self.profile.starter) if self.profile.starter else None
        by_markers = ends_by_markers(ids, marker, count) if marker is not None else None
        if by_markers is not None:
            return TokenizedChat(ids, by_markers, "markers")
        return TokenizedChat(ids, ends_by_estimate([content_length(m) for m in chat.messages], len(ids)), "estimate")

    def _probed(self, template: str | None) -> TemplateProfile:
        if template is None:
            return TemplateProfile(reason="no chat template")
        self._template = compiled(template)
        tree = self._template.environment.parse(template)
        self._variables, extra = read_variables(tree)
        eos = self._special.get("eos_token", "")
        quoting, exact = compared_texts(tree)
        known = TemplateProfile(markers=clean_tokens(self._backend), quoting=quoting, exact=exact)
        trailers = tuple(dict.fromkeys(("", eos, eos + "\n")))
        profile = TemplateProbe(self._render, self._encode, known, extra, trailers).profile()
        if profile.reason == SHOWS_NOTHING:  # all chats would be one
            logger.warning(event("tokenizer.template", why=SHOWS_NOTHING))
            self._template = None
        return profile

    def _turns_alike(self, other: TemplateProfile) -> bool:
        """Whether one rule says of the chats of both templates which texts are equal tokens."""
        rules = [(each.hoists_system, each.reasoning_moves, each.results) for each in (self.profile, other)]
        return other.keeps_turns and rules[0] == rules[1]

    def _measured(self) -> float:
        """Return the characters of a token. Raises ConfigError where the vocabulary makes no tokens of a text."""
        try:
            tokens = self._encode([MEASURE])[0]
        except TemplateRefused as error:
            raise ConfigError([f"tokenizer: it can't read a text: {words_of(error)}"]) from error
        if not tokens:
            raise ConfigError(["tokenizer: its vocabulary is empty: no text has tokens"])
        return len(MEASURE) / len(tokens)

    def _probe_tokens(self) -> ProbeTokens:
        """Return the tokens of what engines are asked to tokenize as well."""

        def tokens_of(text: Callable[[], str]) -> Sequence[int]:
            try:
                return tuple(self._encode([text()])[0])
            except TemplateRefused:  # the template, or the vocabulary, was not made for such texts
                return ()

        chat = self._normalised(Chat(PROBE_CHAT))
        return ProbeTokens(tokens_of(lambda: PROBE_TEXT), tokens_of(lambda: self._render(chat, generation=True)))

    def _report(self) -> str:
        profile = self.profile
        return (
            f"incremental={profile.incremental} keeps_turns={profile.keeps_turns} "
            f"hoists_system={profile.hoists_system} windows={profile.windows} "
            f"plain_roles={','.join(profile.affixes) or 'none'} content={'parts' if profile.parts else 'string'} "
            f"reason={profile.reason!r}"
        )


@dataclass(frozen=True, slots=True)
class PlainTokenizer:
    """A tokenizer that needs no transformers, with what one of transformers is asked for."""

    backend_tokenizer: Tokenizer
    special_tokens_map: Mapping[str, str]
    chat_template: str | Mapping[str, str] | None


def load_plain(folder: Path) -> PlainTokenizer | None:
    """Load what a folder holds, or return None if transformers shall, which also knows what is wrong with its files."""
    config, own = folder / "config.json", folder / "chat_template.jinja"
    older = any((folder / name).exists() for name in ("special_tokens_map.json", "added_tokens.json"))
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        model = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
        template = own.read_text(encoding="utf-8") if own.exists() else None
        found = plain_files(settings, model, template=template, older=older)
        if found is None or (folder / "additional_chat_templates").exists():
            return None
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # of tokenizers, which raises nothing more special; and what files of any content bring
        return None
    added = {
        str(number): {name: getattr(token, name) for name in ADDED_TOKEN_FIELDS}
        for number, token in backend.get_added_tokens_decoder().items()
    }
    return PlainTokenizer(backend, found.special_tokens_map, found.chat_template) if found.fit(added) else None


def load_tokenizer(source: str, *, local: bool) -> Any:
    """Load with AutoTokenizer, without its logs; from the cache if the hub can't be reached. Raises ConfigError."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it advises to install PyTorch
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes a second; only who loads a tokenizer shall wait

    if not local:
        check_hub_id(source)
    reachable = local or hub_answers(source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, local_files_only=local or not reachable, trust_remote_code=False
        )
    except Exception as error:
        why = "the hub can't be reached, and its cache on this machine does not have it"
        why = why_not(source, error) if reachable else why
        raise ConfigError([f"tokenizer: {source!r} can't be loaded: {why}"]) from error
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError([f"tokenizer: {source!r} has no tokenizer.json (a fast tokenizer is needed)"])
    return tokenizer


def check_hub_id(source: str) -> None:
    """Raise ConfigError if this can't be a hub id. Asks no hub."""
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415 - see load_tokenizer
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # noqa: PLC0415

    if Path(source).is_file():
        raise ConfigError([f"tokenizer: {source!r} is a file, expected the directory that it lies in, or a hub id"])
    try:
        validate_repo_id(source)
    except HFValidationError as error:
        raise ConfigError(
            [f"tokenizer: {source!r} can't be loaded: it is no directory, and can be no hub id"]
        ) from error


def check_files(source: str, chat_template: str) -> None:
    """Raise ConfigError as `ChatTokenizer.load` would for files on this machine. Asks no hub."""
    if Path(source).is_dir():
        ChatTokenizer.load(source, chat_template=chat_template)
        return
    if is_on_hub(source):
        check_hub_id(source)
    if chat_template:
        compiled(read_template(None, chat_template) or "")


def is_on_hub(source: str) -> bool:
    """Whether `source` means a tokenizer of the hub, not one of this machine."""
    return source not in ("", "embedded") and not Path(source).is_dir()


def why_not(source: str, error: Exception) -> str:
    """Explain in one line why these files make no tokenizer; transformers' own messages are about its classes."""
    folder = Path(source)
    if folder.is_dir() and not any((folder / name).is_file() for name in ("tokenizer.json", "tekken.json")):
        return "there is no tokenizer.json in it (a fast tokenizer is needed)"
    if not folder.is_dir() and (file := refused_file(error)) is not None:
        return f"the cache of downloads can't be used: {file.filename}: {file.strerror}; set HF_HOME to a directory"
    return f"its files make no tokenizer: {type(error).__name__}: {str(error).partition(chr(10))[0]}"


def refused_file(error: Exception) -> OSError | None:
    """Return the error about a file, if one is the cause of this error of transformers or the hub's library."""
    return next((each for each in causes(error) if isinstance(each, OSError) and each.filename), None)


def hub_answers(source: str) -> bool:
    """Whether the hub answers about this id. Raises ConfigError if it has no such model."""
    from huggingface_hub import HfApi  # noqa: PLC0415 - see load_tokenizer
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError  # noqa: PLC0415

    hub = HfApi()
    try:
        hub.model_info(source, timeout=HUB_ANSWER_S)
    except RepositoryNotFoundError as error:
        why = f"it is no directory, and {hub.endpoint} has no such model, or none for us: private ones need HF_TOKEN"
        raise ConfigError([f"tokenizer: {source!r} can't be loaded: {why}"]) from error
    except Exception as error:  # the hub's library does not document what it raises
        answered = isinstance(error, HfHubHTTPError) and error.response.status_code < SERVER_ERRORS
        # e.g. by a mirror that has the files but not this page; a file is refused before anybody was asked
        if not answered and refused_file(error) is None:
            why = type(error).__name__
            logger.warning(event("tokenizer.hub", hub=hub.endpoint, why=str(why)))
            return False
    return True


def read_template(tokenizer: Any, chosen: str | None) -> str | None:
    """Return the chat template: the chosen one (text or a path), else the tokenizer's own. Raises ConfigError."""
    if chosen:
        if "{" in chosen or "\n" in chosen:
            return chosen
        try:
            return Path(chosen).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise ConfigError([f"chat_template: {chosen!r} can't be read: {error}"]) from error
    own = tokenizer.chat_template
    if isinstance(own, Mapping):
        own = own.get("default")
    return own or None


def read_tool_template(tokenizer: Any) -> str | None:
    """Return the template by which transformers renders chats with tools, if that is another one than the default."""
    own = tokenizer.chat_template
    return own.get("tool_use") or None if isinstance(own, Mapping) and own.get("default") else None


def identity_of(tokenizer_data: bytes, templates: str, special: Mapping[str, Any]) -> str:
    """Return a digest of everything that determines the tokens of a chat."""
    digest = blake2b(digest_size=16)
    for part in (tokenizer_data, templates.encode(), repr(sorted(special.items())).encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def compiled(template: str) -> jinja2.Template:
    """Compile a chat template. Raises ConfigError."""
    try:
        return compile_template(template, lambda form: datetime.now().strftime(form))  # noqa: DTZ005  # as engines do
    except jinja2.TemplateError as error:
        raise ConfigError([f"chat_template: does not compile: {error}"]) from error


def clean_tokens(backend: Any) -> tuple[str, ...]:
    """Return the added tokens that always split a text where they stand, whatever surrounds them.

    Such a token is found in the raw text before anything else and takes no blanks with it, and no other added token can
    take a part of it: none overlaps its start, contains it, or begins with it.
    """
    added = list(backend.get_added_tokens_decoder().values())
    texts = {token.content for token in added if token.content}
    starts: dict[str, list[str]] = {}
    for text in texts:
        for size in range(1, len(text)):
            starts.setdefault(text[:size], []).append(text)
    swallowed = {text for text in texts if text in starts}
    for text in texts:
        for begin in range(1, len(text)):
            swallowed.update(starts.get(text[begin:], ()))
            swallowed.update(part for stop in range(begin + 1, len(text) + 1) if (part := text[begin:stop]) in texts)
    clean = {
        token.content
        for token in added
        if not (token.normalized or token.lstrip or token.rstrip or token.single_word or backend.encode_special_tokens)
    }
    return tuple(sorted((clean & texts) - swallowed))
