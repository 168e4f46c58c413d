"""Reads request bodies into Prompts. The engine defines the schema: only what is not JSON is refused here.

Rule: bodies of all APIs that carry a conversation are read as the chat that engines make of them (`request_apis`). A
body that is JSON but not understood, or would take too long to understand (`body_json`), becomes an opaque Prompt,
which is placed by load. A chat whose history was seen before is found by the digest of its raw bytes (`_continuing`).
Invariant: a chat read turn by turn has the chain of the chat read at once (test_request_body.py).
Bounds: one call parses what `body_json` allows, and MESSAGES_MAX messages; a Prompt keeps no more, and TAIL_BYTES_MAX.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import xxhash

from ranvier_py.core.ids import Fingerprint
from ranvier_py.core.prompts import body_json
from ranvier_py.core.prompts.body_json import exact_json, excess, members_at_ends, object_of, read_object
from ranvier_py.core.prompts.body_members import (
    MESSAGES_MAX,
    NAMESPACE_FIELDS,
    UNUSUAL_MEMBERS,
    are_few,
    are_objects,
    counts_differ,
    first_prompt,
    has_name,
    is_short,
    kept_members,
    may_be_cut,
    misfit,
    names_stored,
    namespace_member,
    prefix_len,
    replaces_prompt,
    session_name,
    stream_options,
    token_ids,
    with_short_name,
)
from ranvier_py.core.prompts.boundaries import Message
from ranvier_py.core.prompts.fingerprint import TextHasher, TokenHasher, canonical_message
from ranvier_py.core.prompts.message_ends import (
    CUTS_MAX,
    are_in_history,
    is_cut,
    last_end,
    load_rest,
    message_cuts,
    stands_twice,
    unmarked,
)
from ranvier_py.core.prompts.namespaces import TokenNamespaces
from ranvier_py.core.prompts.prompt import Boundary, ForgetfulMemory, KnownPrefix, Note, Prompt, PromptMemory
from ranvier_py.core.prompts.request_apis import CHAT, LEAD, MESSAGES, PIECES_MAX, RESPONSES, Api, hoisted, is_tangled
from ranvier_py.core.prompts.reserved_members import NOTHING, STORED_MEMBERS, may_hide, reserved_in
from ranvier_py.core.prompts.templates import is_behind_reasoning
from ranvier_py.core.prompts.tenants import salt_of

__all__ = ["Prompt", "PromptReader"]

NAMESPACE = frozenset(NAMESPACE_FIELDS)

REPARSED_BYTES_MAX = body_json.UNCOUNTED_BYTES_MAX
"""Bytes that are parsed again, in all tries together, to find where the last messages end. If the last message is
longer, its end is not found: the next turn is then read from an earlier end, or as a first one. Once more all that is
new is parsed to prove what was found, but for a longer first body in which no list before the history stands twice."""

KNOWN_BYTES_MAX = 16 * 1024 * 1024
# A chat with a known history may be longer than one that is parsed, for images that came turn by turn. Searching it for
# message ends and digesting it takes 1 ms for each MiB, even of texts made to be searched slowly.

TAIL_BYTES_MAX = 8 * 1024
"""A longer tail is not kept as objects, which may take 27 times its size; if needed, the body is parsed again."""

new = tuple.__new__
"""Makes a NamedTuple in half the time of a call of its class."""

MESSAGE_OVERHEAD_TOKENS = 5  # markers and role of a message in ChatML and Llama 3, for estimates only
NAMESPACES_MAX = 1024  # cached fingerprints of namespaces that consist of a model's name only


class PromptReader:
    """Reads bodies into Prompts and remembers their prefixes.

    `identity` is a digest of tokenizer and template: prompts under different ones never match. `bytes_per_token` serves
    to estimate until tokens are known. `digest_seed` is a secret of this process, so that nobody can craft two bodies
    with one digest. `hoists_system`: the template renders system messages before all others, so they come first here,
    too. `reasoning_moves`, `results`: see `TemplateProfile`.
    """

    def __init__(  # noqa: PLR0913  # a place where parts meet, each named
        self,
        texts: TextHasher,
        tokens: TokenHasher,
        memory: PromptMemory,
        *,
        identity: str,
        bytes_per_token: float,
        digest_seed: int,
        hoists_system: bool = False,
        reasoning_moves: bool = False,
        results: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._texts = texts
        self._tokens = tokens
        self.memory = memory
        self._identity = identity
        self._bytes_per_token = bytes_per_token
        self._seed = digest_seed
        self._hoists_system = hoists_system
        self._reasoning_moves = reasoning_moves
        self._results = results
        self.digest = texts.digest
        self._namespaces: dict[str, Fingerprint] = {}
        self._token_namespaces = TokenNamespaces(texts, identity)
        self.namespace_of = self._token_namespaces.of  # of tokens, hence independent of a prompt's tools and templates

    def forgetful(self, tokens: TokenHasher) -> PromptReader:
        """Return a reader that reads the same but remembers nothing. `tokens` must hash as this reader's does."""
        twin = copy(self)
        twin.memory, twin._tokens, twin._namespaces = ForgetfulMemory(self.memory), tokens, dict(self._namespaces)
        return twin

    def chat(self, body: bytes, tenant: bytes = b"", api: Api = CHAT) -> Prompt:
        """Read a body of this API. `tenant` is empty where tenants are not kept apart.

        Raises BadRequest if the body is not JSON.
        """
        prompt = self._continuing(body, tenant, api) if len(body) <= KNOWN_BYTES_MAX else None
        if prompt is not None:
            self.memory.counters.found += 1
            return prompt
        reason = excess(body)
        fields = None if reason else read_object(body)
        if fields is None:
            prompt = self._unparsed(body, tenant, reason or "values")
            if api is RESPONSES:
                prompt.previous = members_at_ends(body, STORED_MEMBERS[0]).get(STORED_MEMBERS[0], "")
            return prompt
        prompt = self._whole(body, fields, tenant, api)
        prompt.reserved = found = reserved_in(fields) if fields else None
        if found is not None and found is not NOTHING and may_hide(fields, api.history, body, found):
            prompt.note = None  # a known history has none of them, so that only the rest has to be looked at
        return prompt

    def _whole(self, body: bytes, fields: dict[str, Any], tenant: bytes, api: Api) -> Prompt:
        """Read a body whose members were parsed."""
        items = api.items(fields)
        reason = misfit(fields, items, len(body)) or replaces_prompt(fields, api.name)
        reason = reason or ("messages" if is_tangled(items, api) else "")
        if not reason and api is RESPONSES and names_stored(fields):
            reason = "stored"
        if reason:
            prompt = self._opaque(fields, body, tenant, reason)
            if api is RESPONSES and type(previous := fields.get(STORED_MEMBERS[0])) is str:
                prompt.previous = previous
            return prompt
        self.memory.counters.missed += 1
        try:
            return self._first_contact(body, fields, items, tenant, api)
        except (TypeError, UnicodeError):  # values that only other JSON libraries accept, such as lone surrogates
            return self._opaque(fields, body, tenant, "values")

    def completion(self, body: bytes, tenant: bytes = b"", api: str = "completion") -> Prompt:
        """Read a body of /v1/completions: `prompt` is text or token ids, or a list of these, of which the first counts.

        `api` "generate": a body of SGLang's /generate, with `text` or `input_ids`. Raises BadRequest if it is not JSON.
        """
        reason = excess(body)
        fields = None if reason else read_object(body)
        if fields is None:
            return self._unparsed(body, tenant, reason or "values")
        prompt = self._whole_completion(body, fields, tenant, api)
        prompt.reserved = reserved_in(fields) if fields else None
        return prompt

    def _whole_completion(self, body: bytes, fields: dict[str, Any], tenant: bytes, api: str) -> Prompt:
        text, has_more = first_prompt(fields)
        ids = token_ids(text)
        if ids is None and not (isinstance(text, str) and text):
            return self._opaque(fields, body, tenant, "schema")
        reason = replaces_prompt(fields, api) if has_name(fields) else "model"
        if reason:
            return self._opaque(fields, body, tenant, reason)
        try:
            root = self._root(fields, tenant)
            data = ids.tobytes() if ids is not None else str(text).encode()
        except (TypeError, UnicodeError):
            return self._opaque(fields, body, tenant, "values")
        fingerprint = self._texts.extend_bytes(root.text, data, ids=ids is not None)
        length = int(len(data) / self._bytes_per_token) if ids is None else len(ids)
        end = self.memory.boundary(fingerprint) or Boundary(root, fingerprint, length, self._tokens.block_tokens)
        if ids is not None and end.state is None and root.state is not None:
            end.tokenized(self._tokens.extend(root.state, ids, [len(ids)])[0])
        self.memory.keep(end)
        prompt = self._prompt("completion", fields, body, tenant, end, root, ())
        prompt.api, prompt.counts_differ = api, prompt.counts_differ or has_more
        prompt.bare = fields.get("add_special_tokens") is False
        return prompt

    def other(self, body: bytes, tenant: bytes = b"", *, continues: bool = False) -> Prompt:
        """Read a body of any other path, JSON or not: its model counts, and with `continues` the response it names."""
        reason = excess(body)
        if reason:
            return self._unparsed(body, tenant, reason)
        fields = object_of(body)
        prompt = self._opaque(fields or {}, body, tenant)
        prompt.reserved = reserved_in(fields) if fields is not None else None
        if continues and fields and type(previous := fields.get(STORED_MEMBERS[0])) is str:
            prompt.previous = previous
        return prompt

    def _unparsed(self, body: bytes, tenant: bytes, reason: str) -> Prompt:
        """Make the prompt of a body that is not parsed as a whole. A salt in it separates it from all other bodies."""
        fields: dict[str, Any] = members_at_ends(body)
        if tenant and b'"cache_salt"' in body:
            fields["cache_salt"] = f"{xxhash.xxh3_128_intdigest(body, self._seed):032x}"
        return self._opaque(fields, body, tenant, reason)

    def _opaque(self, fields: Mapping[str, Any], body: bytes, tenant: bytes, reason: str = "") -> Prompt:
        """Make a prompt that reveals nothing about its prefix; `reason` is why."""
        root = Boundary(None, Fingerprint(0), 0)
        prompt = self._prompt("opaque", with_short_name(fields), body, b"", root, root, ())
        prompt.unread = reason
        prompt.salt = salt_of(self._texts, fields, tenant)
        return prompt

    def _continuing(self, body: bytes, tenant: bytes, api: Api) -> Prompt | None:
        """Return the prompt of a chat with a known history; None if it is none, or must be read as a whole.

        {"messages":[{…},{…},{"role":"user",…}],"stream":true}
                     known ──┘└── parsed as {"messages":[null,{"role":"user",…}],"stream":true}

        Exact: the digest proves that the bytes before the cut once began a valid body and ended at a message end; the
        parse of the rest proves that it closes exactly that array and that object. The search for `"role"` only
        proposes.
        """
        cuts: list[int] = []
        for cut in message_cuts(body, api.marks):
            known = self.memory.find(self._digest(body, cut, tenant, api))
            cuts.append(cut)
            if known is None:
                continue
            size = len(body) - cut
            rest = None if size > body_json.UNCOUNTED_BYTES_MAX and excess(body[cut:]) else load_rest(body, cut, api)
            if rest is None:
                return None
            items = rest[0]
            if not are_objects(items) or known.end.messages + len(items) > MESSAGES_MAX:
                return None
            if not are_few(len(items), size) or (size > 2 * PIECES_MAX and is_tangled(items, api)):
                return None
            return self._continued(body, cuts, known, rest, tenant, api)
        return None

    def _continued(
        self,
        body: bytes,
        cuts: Sequence[int],
        known: KnownPrefix,
        rest: tuple[Sequence[Message], Mapping[str, Any]],
        tenant: bytes,
        api: Api,
    ) -> Prompt | None:
        """Return the prompt of a chat whose history is known up to the last of `cuts`; None if it differs after all."""
        (items, members), cut = rest, cuts[-1]
        fields, alone = known.fields, True
        try:
            if members:
                fields = {**fields, **api.members(members)}
                alone = NAMESPACE.isdisjoint(members) and api.lead not in members
                if replaces_prompt(members, api.name):
                    return None
            opening = None if alone and known.alone else self._opening(self._namespace(fields, tenant), fields)
            if opening not in (None, known.namespace):
                return None
            if api is RESPONSES and names_stored(fields):
                return None
            if self._hoists_system and any(item.get("role") == "system" for item in items):
                return None  # a system message belongs before the known history
            messages, ends, end = self._extend(known.end, items, api, keeps=False)
        except (TypeError, UnicodeError):
            return None
        base = self.memory.deepest_known(known.end, end) if api is MESSAGES else known.end
        self._keep(ends)
        if len(messages) > len(items) and not are_few(known.end.messages + len(messages), len(body)):
            return None
        tail = messages[base.messages - known.end.messages :] if len(body) - cut <= TAIL_BYTES_MAX else ()
        prompt = self._prompt("chat", fields, body, tenant, end, base, tail)
        prompt.api, prompt.reserved = api.name, reserved_in(members) if members else NOTHING
        known = new(KnownPrefix, (end, known.namespace, known.fields, alone))
        prompt.note = new(Note, (api, cut, cuts, ends, known, list(members), (), tenant))
        return prompt

    def _first_contact(
        self, body: bytes, fields: dict[str, Any], items: Sequence[Message], tenant: bytes, api: Api
    ) -> Prompt:
        names = list(fields)
        fields = {**api.members(fields)}
        root = self._root(fields, tenant)
        lead: Sequence[Message] = fields.get(LEAD, ()) if api.lead else ()
        extend = self._extend_hoisted if self._hoists_system else self._extend
        messages, ends, end = extend(self._extend(root, lead, CHAT)[2], items, api)
        if len(messages) > len(items) and not are_few(len(messages), len(body)):
            return self._opaque(fields, body, tenant, "messages")
        place = names.index(api.history)
        after = names[place + 1 :]
        ahead = {name: fields[name] for name in (*names[:place], LEAD) if name in fields}
        digest = {LEAD: self._lead_digest(ahead)} if LEAD in ahead else {}
        head = self._reduced(ahead) | digest | kept_members(ahead)  # what `_prompt` and `_namespace` read, bounded
        if api.lead in after:
            head.pop(LEAD, None)
        alone = NAMESPACE.isdisjoint(after) and api.lead not in after
        known = KnownPrefix(end, self._opening(root.text, fields), head, alone)
        tail = [*lead, *messages] if len(body) <= TAIL_BYTES_MAX else ()
        prompt = self._prompt("chat", fields, body, tenant, end, root, tail)
        prompt.api = api.name
        if type(fields[api.history]) is list:
            lists = [name for name in names[:place] if type(fields.get(name)) is list]
            prompt.note = Note(api, 0, list(message_cuts(body, api.marks)), ends, known, after, lists, tenant)
        return prompt

    def _extend(
        self, boundary: Boundary, items: Sequence[Message], api: Api, *, keeps: bool = True
    ) -> tuple[Sequence[Message], Sequence[Boundary | None], Boundary]:
        """Return the messages of these items, the boundaries of the last CUTS_MAX + 1 items, last first, and the end.

        An item that another one may join has no boundary. `keeps`: remember the last two boundaries.
        """
        messages: list[Message] = []
        ends: list[Boundary | None] = []
        if api is CHAT:
            messages = list(items)
            for message in messages:
                boundary = self.extend(boundary, message)
                ends.append(boundary)
        elif api.joins:
            messages, counts = api.joined(items)
            found = [boundary := self.extend(boundary, message) for message in messages]
            ends = [None if messages[count - 1]["role"] == "assistant" else found[count - 1] for count in counts]
        else:
            for item in items:
                for message in api.messages(item):
                    boundary = self.extend(boundary, message)
                    messages.append(message)
                ends.append(boundary)
        ends = ends[: -CUTS_MAX - 2 : -1]
        if keeps:
            self._keep(ends)
        return messages, ends, boundary

    def _extend_hoisted(
        self, boundary: Boundary, items: Sequence[Message], api: Api
    ) -> tuple[Sequence[Message], Sequence[Boundary | None], Boundary]:
        """As `_extend`, but with system messages first. An item before the last system message has no boundary."""
        last = max([number for number, item in enumerate(items) if item.get("role") == "system"], default=-1)
        if all(item.get("role") == "system" for item in items[: last + 1]):
            return self._extend(boundary, items, api)
        messages, _, middle = self._extend(boundary, hoisted(api.chat(items[: last + 1])), CHAT)
        rest, ends, end = self._extend(middle, items[last + 1 :], api)
        return [*messages, *rest], [*ends, middle, *[None] * last][: CUTS_MAX + 1], end

    def _keep(self, ends: Sequence[Boundary | None]) -> None:
        """Remember the boundaries of the last two items. `ends` has the last one first."""
        for end in ends[:2]:
            if end is not None:
                self.memory.keep(end)

    def extend(self, boundary: Boundary, message: Message) -> Boundary:
        """Return the boundary at the end of `message` behind `boundary`. Raises TypeError for values beyond JSON."""
        canonical = canonical_message(message)
        text = self._texts.extend(boundary.text, canonical)
        known = self.memory.boundary(text)
        if known is not None:
            return known
        length = boundary.length + MESSAGE_OVERHEAD_TOKENS + int(len(canonical) / self._bytes_per_token)
        moves = self._reasoning_moves and is_behind_reasoning(boundary.moves, message, self._results)
        return Boundary(boundary, text, length, self._tokens.block_tokens, moves=moves)

    def remember(self, prompt: Prompt) -> None:
        """Remember the last two message ends of a chat: the next turn continues at one, a branch at the other.

        Separate from reading, because this can wait until the request is on its way. A second call does nothing.
        """
        note, prompt.note = prompt.note, None
        if note is None:
            return
        body, room, api = prompt.body, REPARSED_BYTES_MAX, note.api
        cuts = [cut for cut in note.cuts if cut > note.cut]
        # only clients of one API mark where caches end, and move the marks on with each turn
        start = unmarked(body, note.cuts, room) if api is MESSAGES and note.cuts else 0
        places: list[tuple[int, int]] = []  # ends of items, each with the number of items behind it
        for following, (cut, end) in enumerate(zip(cuts, note.ends[1:], strict=False), 1):
            if end is not None and (not places or cut == start) and len(body) - cut <= room:
                room -= len(body) - cut
                if is_cut(body, cut, following, note.after, api):
                    places.append((cut, following))
        cut = last_end(body, max([note.cut, *cuts[:1]]), room, note.after, api) if note.ends and note.ends[0] else 0
        if cut:
            places.append((cut, 0))
        # behind a known end of a history that ends its body, all is history
        in_doubt = note.after if note.cut else len(body) <= REPARSED_BYTES_MAX or stands_twice(body, note.lists)
        if places and in_doubt and not are_in_history(body, note.cut, places, api):
            return
        for cut, following in places:
            if (end := note.ends[following]) is not None:
                known = new(KnownPrefix, (end, *note.known[1:]))
                self.memory.remember(self._digest(body, cut, note.tenant, api), known)

    def _digest(self, body: bytes, cut: int, tenant: bytes, api: Api) -> int:
        """Return the digest of the bytes up to a cut, separate for each API and tenant."""
        seed = self._seed ^ api.number
        if tenant:
            seed ^= int.from_bytes(tenant[:8], "little")
        return xxhash.xxh3_128_intdigest(memoryview(body)[:cut], seed)

    def _root(self, fields: Mapping[str, Any], tenant: bytes) -> Boundary:
        """Return the empty prefix of the namespace of these members. Raises TypeError for values beyond JSON."""
        namespace = self._namespace(fields, tenant)
        root = self.memory.boundary(namespace)
        if root is None:
            salted = {**fields, "cache_salt": salt_of(self._texts, fields, tenant)} if tenant else fields
            root = Boundary(None, namespace, 0)
            root.state = self._tokens.start(self._token_namespaces.of_fields(salted))
            self.memory.keep(root)
        return root

    def _opening(self, namespace: Fingerprint, fields: Mapping[str, Any]) -> Fingerprint:
        """Return a fingerprint of namespace and lead, so of all members that decide what precedes the history."""
        return self._texts.extend_bytes(namespace, self._lead_digest(fields)) if LEAD in fields else namespace

    def _lead_digest(self, fields: Mapping[str, Any]) -> bytes:
        """Return the digest of the lead, which is given as messages, or as the digest that was kept of them."""
        lead = fields[LEAD]
        return lead if type(lead) is bytes else self._texts.digest(exact_json(lead))

    def _namespace(self, fields: Mapping[str, Any], tenant: bytes) -> Fingerprint:
        chosen = self._reduced(fields)
        if tenant:
            chosen["cache_salt"] = salt_of(self._texts, chosen, tenant)
        model = chosen.get("model", "")
        if len(chosen) > 1 or type(model) is not str:
            plain = {name: value.hex() if type(value) is bytes else value for name, value in chosen.items()}
            return self._texts.namespace({**plain, "tokenizer": self._identity})
        found = self._namespaces.get(model)
        if found is None:
            found = self._texts.namespace({"model": model, "tokenizer": self._identity})
            if len(self._namespaces) < NAMESPACES_MAX:
                self._namespaces[model] = found
        return found

    def _reduced(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the members of the namespace; a large one as a digest, in bytes, which no value of JSON equals."""
        return {
            name: value if is_short(value) else self._texts.digest(exact_json(value))
            for name in NAMESPACE_FIELDS
            if name in fields and (value := namespace_member(name, fields[name]))
        }

    def _prompt(
        self,
        kind: str,
        fields: Mapping[str, Any],
        body: bytes,
        tenant: bytes,
        end: Boundary,
        base: Boundary,
        tail: Sequence[Message],
    ) -> Prompt:
        unusual = not UNUSUAL_MEMBERS.isdisjoint(fields)
        if unusual and kind != "opaque" and may_be_cut(fields, len(body)):
            return self._opaque(fields, body, tenant, "truncated")
        model = fields.get("model")
        stream = fields.get("stream") is True
        prompt = Prompt(
            kind=kind,
            model=model if type(model) is str else "",
            stream=stream,
            end=end,
            base=base,
            tail=tail,
            body=body,
            api=kind,
        )
        if unusual:
            if "stream_options" in fields:
                prompt.stream_options = stream_options(fields)
            if "prefix_len" in fields:
                prompt.prefix_len = prefix_len(fields)
            prompt.stores = fields.get("store") is not False
            prompt.counts_differ = counts_differ(fields)
            prompt.session_name = session_name(fields)
        if tenant:
            prompt.salt = salt_of(self._texts, fields, tenant)
        return prompt
