"""The lines that `ranvier lint` and `ranvier clients` print: who breaks his own prefixes where, and what helps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ranvier_py.core.prompts.request_apis import CHAT, MESSAGES, RESPONSES

PATHS = {"/v1/chat/completions": CHAT, "/v1/messages": MESSAGES, "/v1/responses": RESPONSES}

UNSEEN = "unseen"
"""The cause of a departure in a recording, which has no text."""

ADVICE = {
    "model": "conversations that change their model begin anew there",
    "tools_reordered": "send the tools in one order: sort them by name",
    "tools_changed": "add tools at the end, or not within a conversation",
    "uuid": "leave the id out, or send it behind the history or in a header",
    "nonce": "leave it out (Claude Code: CLAUDE_CODE_ATTRIBUTION_HEADER=0), or send it in a header",
    "time": "leave the time out, or send it in the last message",
    "date": "send the date in the last message, or leave it as the conversation began with",
    "counter": "send the number behind the history, not before it",
    "system_turn": "send it as a user message: templates move system messages to the front",
    "reasoning_dropped": "keep the thoughts in the history, and have the template keep them (preserve_thinking)",
    "moved_block": "leave the block where it was: append, never insert",
    "compaction": "compact seldom: what is left is computed anew",
    "edited": "append to the history instead of changing it",
    UNSEEN: "a recording has no text: lint captured requests of this client to see what changes there",
}


def page(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the report."""
    if not rows:
        yield f"no conversations: nothing of {', '.join(PATHS)}"
    for row in rows:
        lost = row["break_tokens"]
        share = 100 * lost / max(1, row["prompt_tokens"])
        reused, reusable = row["reused_share"], row["reusable_share"]
        yield (
            f"{row['client']}: {row['turns']} turns, about {row['prompt_tokens']:,} prompt tokens, "
            f"{lost:,} ({share:.1f} %) computed again for a broken prefix"
            + (f", {100 * reused:.1f} % reused as engines count it" if reused is not None else "")
            + (f", {100 * reusable:.1f} % were in an earlier prompt" if reusable is not None else "")
        )
        for each in row["breaks"]:
            where = "within a session" if each["scope"] == "turn" else "from session to session"
            where += f", {each['prefill_s']:.1f} s of prefill" if each["prefill_s"] else ""
            yield f"  {each['tokens']:>9,} tokens  {each['count']:>4} x  {each['cause']:17} {each['path']}  {where}"
            yield f"{'':28}{ADVICE[each['cause']]}"
            for rule, tokens in each["rules"].items():
                yield f"{'':28}client_rules {rule}=rewrite would save {tokens:,} tokens"


def trial_page(trials: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each trial of a rule that is on: its state and why."""
    for each in trials:
        why = each["why"] or f"{each['sessions']} sessions, {each['sessions_left_alone']} left alone"
        why += f" (found by {each['node']})" if each["node"] else ""
        yield f"rule {each['rule']}, {each['client']}, model {each['model']}: {each['state']}, {why}"
