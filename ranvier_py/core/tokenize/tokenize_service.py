"""The work of the tokenizer process: read answers, tokenize messages, hash tokens.

All tails share one call of the tokenizer, all jobs one call of the hasher. Whatever a client sent, or a template makes
of it, fails its own job at most (FAILED); the other jobs of the batch are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import orjson

from ranvier_py.core.answers.answer_stream import NOTHING, Answer, read_answer
from ranvier_py.core.errors import TemplateRefused
from ranvier_py.core.prompts.body_members import template_members
from ranvier_py.core.prompts.boundaries import Chat, Message, TailJob, TokenIds, TokenizedChat
from ranvier_py.core.prompts.fingerprint import Segment, TokenHasher, TokenState, media_of
from ranvier_py.core.prompts.request_apis import APIS, CHAT, LEAD, MESSAGES, Api, hoisted
from ranvier_py.core.prompts.templates import normalise_tool
from ranvier_py.core.tokenize.sglang_form import sglang_lead, sglang_message, sglang_tools
from ranvier_py.core.tokenize.tokenize_job import TOKENS_MAX, Status, TokenizeJob, TokenizeResult

TEXTS = ("completion", "generate")
"""Kinds of jobs whose content is one text."""


class Tokenizer(Protocol):
    """The interface that the service needs; io/tokenizer.py has the real tokenizer."""

    def tokenize(self, chat: Chat) -> TokenizedChat: ...
    def tokenize_tails(self, jobs: Sequence[TailJob]) -> Sequence[TokenizedChat | None]: ...
    def tokenize_text(self, text: str, *, bare: bool = False) -> TokenIds: ...


class TokenizeWork:
    """One job in progress."""

    __slots__ = ("answer", "hoists_system", "is_whole", "job", "messages", "reads_parts", "segments", "tokenized")

    def __init__(self, job: TokenizeJob, *, hoists_system: bool = False, reads_parts: bool = False) -> None:
        self.job = job
        self.hoists_system = hoists_system
        self.reads_parts = reads_parts
        self.answer: Answer = NOTHING
        self.messages: Sequence[Message] = ()  # to be tokenized: those after the known ones, or all if `is_whole`
        self.is_whole = False
        self.tokenized: TokenizedChat | None = None
        self.segments: Sequence[Segment | None] = ()  # one for each message

    def read(self) -> None:
        """Read the answer, and the messages to tokenize."""
        job = self.job
        if job.answer is not None:
            self.answer = read_answer(job.answer, chunked=job.chunked, streamed=job.streamed, kind=job.kind)
        if job.kind not in TEXTS and job.content is not None:
            self.messages = (
                self.chat().messages[job.known :]
                if job.body
                else self._as_given([*orjson.loads(job.content), *self.answered])
            )

    @property
    def answered(self) -> Sequence[Message]:
        return (self.answer.message,) if self.answer.message else ()

    @property
    def is_tail(self) -> bool:
        """Whether only new messages of a chat with a known history are to be tokenized."""
        return self.job.known > 0 and bool(self.messages) and self.job.length - self.job.state.tokens <= TOKENS_MAX

    @property
    def is_to_tokenize(self) -> bool:
        return bool(self.job.content) if self.job.kind in TEXTS else bool(self.messages)

    @property
    def has_media(self) -> bool:
        return any(type(message.get("content")) is list and media_of(message) for message in self.messages)

    def chat(self) -> Chat:
        """Return the whole conversation, with the answer. Raises BodyNeeded."""
        if not self.job.body:
            raise BodyNeeded
        chat = chat_of(self.job.body, APIS[self.job.kind], by_sglang=self.job.by_sglang)
        messages = hoisted(chat.messages) if self.hoists_system else chat.messages
        return Chat(self._as_given([*messages, *self.answered]), chat.tools, chat.template)

    def _as_given(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages as the engine gives them to the template, as far as not all engines do the same."""
        if not self.job.by_sglang:
            return messages
        return [sglang_message(each, self.job.kind, self.reads_parts) for each in messages]

    def tokenize_whole(self, tokenizer: Tokenizer) -> None:
        """Tokenize what is no tail: first contacts, completions, and tails that can't be rendered alone.

        Raises TemplateRefused, and BodyNeeded.
        """
        self.is_whole = True
        if self.job.length > TOKENS_MAX:
            raise TemplateRefused("the prompt is too long")
        if self.job.kind in TEXTS:
            ids = tokenizer.tokenize_text((self.job.content or b"").decode(), bare=self.job.bare)
            self.tokenized = TokenizedChat(ids, [len(ids)], "rendered")
        else:
            chat = self.chat()
            self.messages = chat.messages
            self.tokenized = tokenizer.tokenize(chat)

    def stretch(self) -> tuple[TokenState, TokenIds, Sequence[int]]:
        """Return what is to be hashed: the state before, the tokens, and where messages end in them."""
        assert self.tokenized is not None
        state = TokenState(0, self.job.root, ()) if self.is_whole else self.job.state
        return state, self.tokenized.ids, [end for end in self.tokenized.ends if end >= 0]

    def take(self, segments: Sequence[Segment]) -> None:
        """Assign one segment to each end that is a clean cut."""
        assert self.tokenized is not None
        found = iter(segments)
        self.segments = [next(found) if end >= 0 else None for end in self.tokenized.ends]

    def result(self, status: Status = Status.DONE) -> TokenizeResult:
        return TokenizeResult(status, self.is_whole, self.segments, self.answer)


class BodyNeeded(TemplateRefused):
    """The new messages alone are not enough, and the job has no body."""


class TokenizeService:
    """Does jobs, batch by batch. Several threads may call it if the tokenizer and the hasher allow that."""

    def __init__(
        self, tokenizer: Tokenizer, hasher: TokenHasher, *, hoists_system: bool = False, reads_parts: bool = False
    ) -> None:
        """`hoists_system`, `reads_parts`: what the template does (`TemplateProfile`)."""
        self._tokenizer = tokenizer
        self._hasher = hasher
        self._hoists_system = hoists_system
        self._reads_parts = reads_parts

    def results(self, jobs: Sequence[TokenizeJob]) -> list[TokenizeResult]:
        """Return the result of each job. Raises nothing, whatever the jobs hold."""
        try:
            template = {"hoists_system": self._hoists_system, "reads_parts": self._reads_parts}
            return self._results([TokenizeWork(job, **template) for job in jobs])
        except Exception:
            if len(jobs) > 1:  # one of them fails the batch: do each alone
                return [result for job in jobs for result in self.results([job])]
            return [TokenizeResult(Status.FAILED)]

    def _results(self, works: Sequence[TokenizeWork]) -> list[TokenizeResult]:
        for work in works:
            work.read()
        tails = [work for work in works if work.is_tail]
        asked = [TailJob(work.messages, work.chat, work.job.known) for work in tails]
        for work, tail in zip(tails, self._tokenizer.tokenize_tails(asked), strict=True):
            work.tokenized = tail
        unfinished = {id(work): self._rest(work) for work in works if work.tokenized is None}
        self._hash([work for work in works if work.tokenized is not None])
        return [work.result(unfinished.get(id(work), Status.DONE)) for work in works]

    def _rest(self, work: TokenizeWork) -> Status:
        """Do a job that was not tokenized as a tail."""
        if work.job.content is None:
            return Status.FAILED
        if not work.is_to_tokenize:
            return Status.DONE
        try:
            work.tokenize_whole(self._tokenizer)
        except BodyNeeded:
            return Status.NEEDS_BODY
        except TemplateRefused:  # the engine will report it itself
            return Status.FAILED
        return Status.DONE

    def _hash(self, works: Sequence[TokenizeWork]) -> None:
        plain = [work for work in works if not work.has_media]
        stretches = [work.stretch() for work in plain]
        for work, segments in zip(plain, self._hasher.extend_many(stretches), strict=True):
            work.take(segments)
        for work in works:
            if work.has_media:
                work.take(self._hashed_with_media(work))

    def _hashed_with_media(self, work: TokenizeWork) -> list[Segment]:
        """Hash message by message, each salted with its media: equal placeholders must not make two images equal."""
        state, ids, _ = work.stretch()
        assert work.tokenized is not None
        segments: list[Segment] = []
        start = 0
        for message, end in zip(work.messages, work.tokenized.ends, strict=True):
            media = media_of(message)
            if media:
                state = self._hasher.salted(state, media)
            if end >= 0:
                segments += self._hasher.extend(state, ids[start:end], [end - start])
                state, start = segments[-1].state, end
        return segments


def chat_of(body: bytes, api: Api = CHAT, *, by_sglang: bool = False) -> Chat:
    """Return the whole conversation of a body. Raises TemplateRefused if engines may each render it differently.

    Tools and lead are as vLLM gives them to the template, or as SGLang does. Tools that `tool_choice` excludes are
    rendered by vLLM, by default, and not by SGLang; no count of such an answer is compared (`counts_differ`).
    """
    fields = orjson.loads(body)
    if fields.get("add_special_tokens"):
        raise TemplateRefused("the tokenizer is to add to what the template prints")
    items, members = api.items(fields), api.members(fields)
    lead = members.get(LEAD, ()) if api.lead else ()
    tools = members.get("tools") or ()
    if by_sglang:
        tools = sglang_tools(tools, fields.get("tool_choice"), api.name)
        lead = sglang_lead(fields["system"]) if api is MESSAGES and lead else lead
    else:
        tools = [normalise_tool(tool) for tool in tools]
    return Chat([*lead, *api.chat(items)], tools or None, template_members(fields))
