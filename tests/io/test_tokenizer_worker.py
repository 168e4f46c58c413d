"""What the tokenizer worker makes of prompts and answers, and what no prompt can do to it."""

import json
import logging
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import trio

from cluster.local_tokenizer import LocalTokenizer
from ranvier_py.core.errors import TemplateRefused, TokenizerLost
from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.boundaries import Chat, TailJob, TokenIds, TokenizedChat
from ranvier_py.core.prompts.fingerprint import is_of_media
from ranvier_py.core.prompts.request_body import Prompt
from ranvier_py.core.routing.backend import ProbeResult
from ranvier_py.core.routing.backends import Outcome
from ranvier_py.core.routing.request_paths import CHAT_PATH, COMPLETION_PATH
from ranvier_py.core.routing.router import Attempt, Router
from ranvier_py.core.tokenize.tokenize_frames import Reply, Setup
from ranvier_py.core.tokenize.tokenize_job import TOKENS_MAX, TokenizeJob, TokenizerFacts
from ranvier_py.core.tokenize.tokenize_service import Tokenizer
from ranvier_py.io.tokenizer import ChatTokenizer
from ranvier_py.io.tokenizer_worker import TokenizerWorker
from ranvier_py.node.engine_cache.push_parts import KeyInbox
from tests.core.routing.test_router import KEY, make_router
from tests.waiting import until

CALL = {"name": "f", "arguments": "{}"}
SECRET_WORDS = "my account number is 4711"
DEADLINE_S = 10


class WordTokenizer:
    """One token for each word of a message's content, and one in front for its role."""

    def __init__(self) -> None:
        self.full = 0
        self.tails = 0

    def tokenize(self, chat: Chat) -> TokenizedChat:
        self.full += 1
        return tokens_of(chat.messages)

    def tokenize_tails(self, jobs: Sequence[TailJob]) -> Sequence[TokenizedChat | None]:
        self.tails += len(jobs)
        return [tokens_of(job.tail) for job in jobs]

    def tokenize_text(self, text: str, *, bare: bool = False) -> TokenIds:
        return words_of(text)


def words_of(text: str) -> TokenIds:
    return np.array([crc32(word.encode()) for word in text.split()], dtype=np.uint32)


def tokens_of(messages: Sequence[Any]) -> TokenizedChat:
    pieces = [words_of(f"<{message['role']}> {shown(message['content'])}") for message in messages]
    ends = np.cumsum([len(piece) for piece in pieces]).tolist()
    return TokenizedChat(np.concatenate(pieces), ends, "rendered")


def shown(content: Any) -> str:
    """What a template shows: for media a placeholder, whatever is in it. Refuses what contains «refuse»."""
    if type(content) is list:
        content = " ".join(part.get("text", "<image>") for part in content)
    if "refuse" in content:
        raise TemplateRefused(f"the template does not like {content!r}")
    if "crash" in content:
        raise ZeroDivisionError(f"the template divides {content!r}")
    return str(content)


class Gate(LocalTokenizer):
    """Lets nothing pass while it is shut."""

    def __init__(self, tokenizer: Tokenizer, facts: TokenizerFacts) -> None:
        super().__init__(Setup("", "", KEY, 16, 0), tokenizer, facts)
        self.opened = trio.Event()
        self.opened.set()
        self.lost = self.junk = False
        self.rejected = 0
        self.with_body: list[bool] = []

    async def ready(self) -> None:
        await self.opened.wait()

    async def ask(self, jobs: Sequence[TokenizeJob], lengths: Sequence[int] = (), *, first: bool) -> Reply:
        if self.lost:
            raise TokenizerLost
        await self.opened.wait()
        self.with_body += [bool(job.body) for job in jobs]
        reply = await super().ask(jobs, lengths, first=first)
        return reply._replace(results=[each._replace(data=b"junk") for each in reply.results]) if self.junk else reply

    def reject(self, why: Exception) -> None:
        self.rejected += 1


FACTS = TokenizerFacts("words", keeps_turns=True, incremental=True, chars_per_token=4.0)


def make(tokenizer: Tokenizer, *, texts_match: bool = True, **limits: int) -> tuple[Router, TokenizerWorker]:
    return make_gated(tokenizer, texts_match=texts_match, **limits)[:2]


def make_gated(
    tokenizer: Tokenizer, *, texts_match: bool = True, incremental: bool = True, **limits: int
) -> tuple[Router, TokenizerWorker, Gate]:
    router = make_router(texts_match=texts_match)
    gate = Gate(tokenizer, replace(FACTS, incremental=incremental))
    inbox = KeyInbox(KEY, 16, "affinity")
    return router, TokenizerWorker(gate, router, inbox, **{"queue_max": 1024, **limits}), gate


@asynccontextmanager
async def running(worker: TokenizerWorker) -> AsyncIterator[None]:
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(worker.run)
            yield
            nursery.cancel_scope.cancel()


async def tokenized_first(worker: TokenizerWorker, prompt: Prompt, deadline_s: float) -> bool:
    async with running(worker):
        return await worker.tokenize_first(prompt, deadline_s)


def body(*messages: tuple[str, Any], **fields: Any) -> bytes:
    return json.dumps(
        {"model": "m", "messages": [{"role": role, "content": content} for role, content in messages], **fields}
    ).encode()


def words(name: str, count: int = 100) -> str:
    return " ".join(f"{name}{number}" for number in range(count))


def start_attempt(router: Router, content: bytes | str = "a", path: bytes = CHAT_PATH) -> Attempt:
    """Of this body, or of a chat of words with this name."""
    prompt = router.read(path, content if isinstance(content, bytes) else body(("user", words(content))))
    return router.start_attempt(prompt, router.place(prompt, router.find(prompt, 0.0)), 0.0)


async def learned(router: Router, worker: TokenizerWorker, attempt: Attempt) -> None:
    """The attempt has its first token, and its prompt is learned."""
    async with running(worker):
        worker.submit(attempt)
        router.first_token(attempt, 0.0)
        await until(lambda: worker.counters.learned)


def whole(text: str) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


def depth(router: Router, prompt: Prompt) -> int:
    holders = router.find(prompt, 0.0).holders
    return holders[0].tokens if holders else 0


@pytest.fixture(scope="module")
def embedded() -> ChatTokenizer:
    return ChatTokenizer.load("embedded")


async def test_a_prompt_is_learned_by_its_tokens_once_its_first_token_has_come() -> None:
    router, worker = make(WordTokenizer())
    attempt = start_attempt(router)
    await learned(router, worker, attempt)
    assert attempt.prompt.end.state is not None
    other = router.read(CHAT_PATH, body(("user", words("a", 60) + " " + words("b", 40))))
    assert depth(router, other) == 0
    assert await tokenized_first(worker, other, 5)
    assert depth(router, other) == 32, "the anchor at two blocks: 61 tokens are shared"


@pytest.mark.parametrize(("owners", "joined"), [(["sglang"] * 4, "one two"), ([*["sglang"] * 3, "vllm"], "one\ntwo")])
async def test_a_prompt_is_tokenized_as_the_engines_of_its_model_print_it(
    owners: Sequence[str], joined: str, embedded: ChatTokenizer
) -> None:
    """SGLang puts a blank between texts, vLLM a line. Engines of both kinds: as vLLM."""
    router, worker = make(embedded)
    for number, owner in enumerate(owners):
        card = {"id": "m", "owned_by": owner}
        router.registry.changes.probed(BackendId(number), ProbeResult(True, models=("m",), cards=(card,)), 0)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    first, answer, last = ("user", parts), ("assistant", "three"), ("user", parts)
    for number, turns in enumerate([(first,), (first, answer, last)]):  # the second one as a tail of the first
        prompt = router.read(CHAT_PATH, body(*turns))
        plain = router.read(CHAT_PATH, body(*[(role, joined if text is parts else text) for role, text in turns]))
        assert prompt.base.messages == plain.base.messages == number
        for each in (prompt, plain):
            router.reader.remember(each)
            assert await tokenized_first(worker, each, 5)
        assert prompt.end.token == plain.end.token
        assert prompt.end.text != plain.end.text


async def test_an_attempt_without_a_first_token_teaches_nothing() -> None:
    router, worker = make(WordTokenizer())
    attempt = start_attempt(router)
    async with running(worker):
        worker.submit(attempt)
        router.finish_attempt(attempt, Outcome.CONNECT_ERROR, 0.0)
        await until(lambda: worker.counters.learned)
    assert len(router.routes) == 0


async def test_an_answer_is_learned_as_part_of_the_next_prompt(embedded: ChatTokenizer) -> None:
    router, worker = make(embedded, texts_match=False)
    attempt = start_attempt(router)
    await learned(router, worker, attempt)
    worker.finish(attempt, whole(words("answer")), chunked=False)
    async with running(worker):
        await until(lambda: worker.counters.learned == 2)
    assert router.counters.answers_learned == 1
    turn = router.read(CHAT_PATH, body(("user", words("a")), ("assistant", words("answer")), ("user", "next")))
    assert depth(router, turn) > attempt.prompt.tokens, "by tokens alone: texts count for nothing here"


async def test_an_answer_that_is_here_before_its_prompt_was_taken_makes_one_job_of_both() -> None:
    tokenizer = WordTokenizer()
    router, worker = make(tokenizer)
    attempt = start_attempt(router)
    worker.submit(attempt)
    router.first_token(attempt, 0.0)
    worker.finish(attempt, whole("yes"), chunked=False)
    async with running(worker):
        await until(lambda: router.counters.answers_learned)
    assert tokenizer.full == 1
    assert worker.counters.queued == 0


async def test_turn_two_is_tokenized_by_its_new_messages_alone() -> None:
    tokenizer = WordTokenizer()
    router, worker = make(tokenizer)
    first = router.read(CHAT_PATH, body(("user", words("a"))))
    assert await tokenized_first(worker, first, 5)
    attempt = start_attempt(router, body(("user", words("a")), ("assistant", "yes"), ("user", words("b"))))
    async with running(worker):
        worker.submit(attempt)
        await until(lambda: worker.counters.learned)
    assert (tokenizer.full, tokenizer.tails) == (1, 1)
    assert attempt.prompt.end.state is not None
    assert attempt.prompt.end.length == 101 + 2 + 101


def test_what_waits_is_bounded_in_number_and_what_finds_no_room_is_dropped() -> None:
    router, worker = make(WordTokenizer(), queue_max=3)
    attempts = [start_attempt(router, f"a{number}") for number in range(5)]
    for each in attempts:
        worker.submit(each)
    assert (worker.counters.queued, worker.counters.dropped) == (3, 2)
    assert [attempt for attempt, _ in worker.take_batch()] == attempts[:3]


def test_what_waits_is_bounded_in_bytes_answers_included() -> None:
    router, worker = make(WordTokenizer(), queue_bytes_max=10_000)
    attempts = [start_attempt(router, body(("user", f"{number}" + "x" * 4000))) for number in range(3)]
    for attempt in attempts:
        worker.submit(attempt)
    assert worker.counters.queued == 2
    assert worker.counters.dropped == 1
    worker.finish(attempts[1], b"y" * 4000, chunked=False)
    assert (worker.counters.queued, worker.counters.dropped) == (2, 2), "the prompt without its answer"
    worker.finish(attempts[1], b"y" * 1000, chunked=False)
    assert [queued.answer for _, queued in worker.take_batch()] == [None, b"y" * 1000]
    worker.finish(attempts[0], b"y" * 20_000, chunked=False)
    assert worker.counters.queued == 0, "one alone may be too much"


async def test_an_answer_whose_prompt_found_no_room_is_learned_with_it_if_there_is_room_by_then() -> None:
    router, worker = make(WordTokenizer(), queue_max=1)
    attempt = start_attempt(router)
    worker.submit(start_attempt(router, "b"))
    worker.submit(attempt)
    router.first_token(attempt, 0.0)
    async with running(worker):
        await until(lambda: worker.counters.learned)
        worker.finish(attempt, whole("yes"), chunked=False)
        await until(lambda: router.counters.answers_learned)
    assert worker.counters.dropped == 1
    assert attempt.prompt.end.state is not None


async def test_tokens_that_come_after_the_deadline_are_counted_late_and_kept_for_the_next_turn(
    autojump_clock: trio.testing.MockClock,
) -> None:
    router, worker, gate = make_gated(WordTokenizer())
    gate.opened = trio.Event()
    prompt = router.read(CHAT_PATH, body(("user", words("a"))))
    async with running(worker):
        assert not await worker.tokenize_first(prompt, 0.15)
        assert prompt.end.state is None
        assert worker.counters.deadlines_missed == 1
        gate.opened.set()
        await until(lambda: prompt.end.state)


async def test_without_a_tokenizer_prompts_are_placed_at_once_and_what_it_had_is_counted_as_lost() -> None:
    router, worker, gate = make_gated(WordTokenizer())
    gate.lost = True
    attempt = start_attempt(router)
    async with running(worker):
        assert not await worker.tokenize_first(router.read(CHAT_PATH, body(("user", words("b")))), math.inf)
        assert (worker.counters.lost, worker.counters.deadlines_missed) == (1, 0)
        worker.submit(attempt)
        await until(lambda: worker.counters.lost == 2)
        gate.lost = False
        worker.finish(attempt, whole("yes"), chunked=False)
        await until(lambda: worker.counters.learned)
    assert attempt.prompt.end.state is not None, "with its answer it was asked again"


async def test_who_answers_with_junk_is_not_asked_any_more_and_teaches_nothing() -> None:
    router, worker, gate = make_gated(WordTokenizer())
    gate.junk = True
    attempt = start_attempt(router)
    async with running(worker):
        assert not await worker.tokenize_first(router.read(CHAT_PATH, body(("user", words("b")))), math.inf)
        worker.submit(attempt)
        await until(lambda: worker.counters.lost == 2)
    assert gate.rejected == 2
    assert attempt.prompt.end.state is None


async def test_what_is_to_be_learned_waits_for_the_next_tokenizer() -> None:
    router, worker, gate = make_gated(WordTokenizer(), queue_max=2)
    gate.opened = trio.Event()
    attempts = [start_attempt(router, f"a{number}") for number in range(3)]
    async with running(worker):
        for attempt in attempts:
            worker.submit(attempt)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert (worker.counters.queued, worker.counters.dropped) == (2, 1)
        gate.opened.set()
        await until(lambda: worker.counters.learned == 2)


TOOL_TURN = (
    {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": CALL}]},
    {"role": "tool", "tool_call_id": "1", "content": words("found")},
    {"role": "user", "content": words("next")},
)


@pytest.mark.parametrize("incremental", [True, False])
async def test_a_turn_that_needs_the_whole_chat_is_learned_like_the_chat_at_once(
    incremental: bool, embedded: ChatTokenizer
) -> None:
    start = [{"role": "system", "content": words("s")}, {"role": "user", "content": words("a")}]
    ends = []
    for turns in ((start, [*start, *TOOL_TURN]), ([*start, *TOOL_TURN],)):
        router, worker, gate = make_gated(embedded, incremental=incremental)
        for messages in turns:
            prompt = router.read(CHAT_PATH, json.dumps({"model": "m", "messages": messages}).encode())
            assert await tokenized_first(worker, prompt, 5)
        ends.append(prompt.end.own_chain)
        assert gate.with_body == ([True, False, True] if incremental else [True, True])[: len(gate.with_body)]
    assert ends[0] == ends[1]
    assert ends[0][0][1]


async def test_a_template_that_refuses_is_counted_as_that_and_not_as_late() -> None:
    router, worker = make(WordTokenizer())
    prompt = router.read(CHAT_PATH, body(("user", f"refuse {words('a')}")))
    assert not await tokenized_first(worker, prompt, 5)
    assert (worker.counters.failed, worker.counters.deadlines_missed) == (1, 0)


@pytest.mark.parametrize("poison", ["refuse", "crash"])
async def test_a_chat_that_breaks_the_template_costs_its_own_job_alone(
    poison: str, caplog: pytest.LogCaptureFixture
) -> None:
    router, worker = make(WordTokenizer())
    contents = [words("a"), f"{poison} {SECRET_WORDS} {words('b')}", words("c")]
    attempts = [start_attempt(router, body(("user", content))) for content in contents]
    with caplog.at_level(logging.DEBUG):
        async with running(worker):
            for attempt in attempts:
                worker.submit(attempt)
            await until(lambda: worker.counters.learned == 2)
    assert worker.counters.failed == 1
    assert [attempt.prompt.end.state is None for attempt in attempts] == [False, True, False]
    assert SECRET_WORDS not in caplog.text


STRANGE = [
    b'{"messages":[{"role":"user","content":"%s"}],"x":NaN}',
    b'{"messages":[{"content":"%s"}]}',
    b'{"messages":[{"role":["x"],"content":"%s"}]}',
    b'{"messages":[{"role":"user","content":5},{"role":"user","content":"%s"}]}',
    b'{"messages":[{"role":"user","content":[5,null,["x"]]},{"role":"user","content":"%s"}]}',
    b'{"messages":[{"role":"user","content":[{"type":"text","text":7}]},{"role":"user","content":"%s"}]}',
    b'{"messages":[{"role":"assistant","tool_calls":5},{"role":"user","content":"%s"}]}',
    b'{"messages":[{"role":"assistant","tool_calls":[5]},{"role":"user","content":"%s"}]}',
    b'{"messages":[{"role":"assistant","tool_calls":[{"function":7}]},{"role":"user","content":"%s"}]}',
    b'{"tools":5,"messages":[{"role":"user","content":"%s"}]}',
    b'{"tools":[5],"documents":7,"messages":[{"role":"user","content":"%s"}]}',
    b'{"chat_template_kwargs":5,"messages":[{"role":"user","content":"%s"}]}',
    b'{"chat_template_kwargs":{"messages":5,"tools":1},"messages":[{"role":"user","content":"%s"}]}',
    b'{"chat_template":[1],"messages":[{"role":"user","content":"%s"}]}',
    b'{"messages":[{"role":"user","content":"%s\\ud800"}]}',
    b'{"messages":[{},{"role":"user","content":"%s"}]}',
]


@pytest.mark.parametrize("strange", STRANGE, ids=range(len(STRANGE)))
async def test_no_body_ends_the_worker(strange: bytes, embedded: ChatTokenizer) -> None:
    router, worker = make(embedded)
    content = strange % words("a").encode()
    prompt = router.read(CHAT_PATH, content)
    if prompt.kind == "chat":
        await tokenized_first(worker, prompt, 5)
    attempts = [start_attempt(router, content), start_attempt(router, "good")]
    async with running(worker):
        for attempt in attempts:
            worker.submit(attempt)
            router.first_token(attempt, 0.0)
            worker.finish(attempt, whole("yes"), chunked=False)
        await until(lambda: attempts[1].prompt.end.state is not None)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b'{"choices":[{"message":{"content":5}}]}',
        b'{"choices":[{"message":{"content":[{"a":1}],"tool_calls":7}}]}',
        b'{"choices":[{"message":{"content":"x","tool_calls":[null]}}]}',
    ],
)
async def test_no_answer_ends_the_worker(answer: bytes, embedded: ChatTokenizer) -> None:
    router, worker = make(embedded)
    attempt, good = start_attempt(router), start_attempt(router, "b")
    async with running(worker):
        worker.submit(attempt)
        router.first_token(attempt, 0.0)
        worker.finish(attempt, answer, chunked=False)
        worker.submit(good)
        await until(lambda: good.prompt.end.state is not None)


async def test_a_prompt_too_long_to_tokenize_is_left_to_its_text() -> None:
    tokenizer = WordTokenizer()
    router, worker = make(tokenizer)
    prompt = router.read(CHAT_PATH, body(("user", "x" * (4 * TOKENS_MAX + 100))))
    assert not await tokenized_first(worker, prompt, 5)
    assert (worker.counters.failed, tokenizer.full) == (1, 0)


def test_long_prompts_are_not_tokenized_all_at_once() -> None:
    router, worker = make(WordTokenizer())
    for number in range(4):
        worker.submit(start_attempt(router, body(("user", f"{number}" + "x" * (4 * TOKENS_MAX * 2 // 5)))))
    assert len(worker.take_batch()) == 2
    assert len(worker.take_batch()) == 2
    assert worker.take_batch() == []


def picture(data: str, text: str = "What is this?") -> tuple[str, Any]:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    return "user", [image, {"type": "text", "text": f"{text} {words('w')}"}]


async def test_two_images_with_equal_text_share_nothing_and_equal_ones_share_all() -> None:
    router, worker = make(WordTokenizer())
    system = ("system", words("s", 64))
    attempt = start_attempt(router, body(system, picture("AAAA"), ("assistant", "a cat"), ("user", words("more"))))
    await learned(router, worker, attempt)
    assert attempt.prompt.end.token
    other = router.read(CHAT_PATH, body(system, picture("BBBB"), ("assistant", "a cat"), ("user", words("more"))))
    assert depth(router, other) == 64, "by text"
    assert await tokenized_first(worker, other, 5)
    assert depth(router, other) == 64, "by tokens: of 65 before the image"
    shared = set(router.holders.chain(attempt.prompt.end)) & set(router.holders.chain(other.end))
    assert max(tokens for tokens, _, _ in shared) == 64
    same = router.read(CHAT_PATH, body(system, picture("AAAA"), ("assistant", "a cat"), ("user", words("more"))))
    assert depth(router, same) == attempt.prompt.tokens


async def test_an_image_in_an_early_turn_keeps_later_turns_apart() -> None:
    router, worker = make(WordTokenizer())
    ends = []
    for data in ("AAAA", "BBBB"):
        first = router.read(CHAT_PATH, body(picture(data)))
        assert await tokenized_first(worker, first, 5)
        turn = router.read(CHAT_PATH, body(picture(data), ("assistant", "yes"), ("user", words("more"))))
        assert await tokenized_first(worker, turn, 5)
        ends.append(turn.end)
    assert ends[0].tokens == ends[1].tokens > 0
    assert all(is_of_media(token) for end in ends for _, token, _ in end.chain()), "no engine's events tell of these"
    plain = router.read(CHAT_PATH, body(("user", words("other")), ("assistant", "yes"), ("user", words("more"))))
    assert await tokenized_first(worker, plain, 5)
    assert not any(is_of_media(token) for _, token, _ in plain.end.chain())
    assert not {token for _, token, _ in ends[0].chain()} & {token for _, token, _ in ends[1].chain()}


async def test_a_text_completion_meets_the_same_prompt_given_as_token_ids() -> None:
    router, worker = make(WordTokenizer())
    text = words("a")
    attempt = start_attempt(router, json.dumps({"model": "m", "prompt": text}).encode(), COMPLETION_PATH)
    await learned(router, worker, attempt)
    ids = router.read(COMPLETION_PATH, json.dumps({"model": "m", "prompt": words_of(text).tolist()}).encode())
    worker.submit(start_attempt(router, ids.body, COMPLETION_PATH))
    assert worker.counters.queued == 0, "ids need no tokenizing"
    assert depth(router, ids) == 96


async def test_salts_and_adapters_keep_equal_tokens_apart() -> None:
    router, worker = make(WordTokenizer())
    prompts = []
    for fields in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"model": "lora"}, {"lora_path": "other"}):
        prompt = router.read(CHAT_PATH, body(("user", words("a")), **fields))
        assert await tokenized_first(worker, prompt, 5)
        prompts.append(prompt)
    tokens = [token for prompt in prompts for _, token, _ in prompt.end.chain()]
    assert len(set(tokens)) == len(tokens) > len(prompts)


async def test_an_answer_too_large_to_wait_leaves_no_trace_in_the_bounds_of_the_queue() -> None:
    router, worker = make(WordTokenizer(), queue_bytes_max=2_000)
    large = start_attempt(router, body(("user", words("a", 2_000))))
    for _ in range(5):
        worker.finish(large, b"x" * 1_500, chunked=False)
    assert worker.counters.queued == 0
    worker.submit(start_attempt(router, "b"))
    assert worker.counters.queued == 1
