"""Installs real agents from npm and PyPI, and says how each is told where its model is and what to do.

    python tests/clients/real_agents.py

They come into .venv-clients beside .venv, each in the version that is named here. Each runs with a home of its own,
asks nobody but the node, and is directed by its user's words, which the lab's engines obey (see `tool_calls` there).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / ".venv-clients"
NPM = (
    "@openai/codex@0.169.0",
    "opencode-ai@1.18.33",
    "@qwen-code/qwen-code@0.24.4",
    "@anthropic-ai/claude-code@2.1.332",
)
PYPI = "aider-chat==0.86.2"
STAMP = PLACE / "installed"
NODE_MAJOR = 20

MODEL = "lab-model"
TABLES = [{"name": "claude-*", "to": MODEL}]
"""Of models, for an agent that is not told what they are called here."""
COMMAND_S_MAX = 120.0


@dataclass(frozen=True, slots=True)
class Step:
    """One start of an agent: its command line, and what is written to it."""

    argv: Sequence[str]
    words: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


def main() -> int:
    """Install what is not there yet. 1 where that is not possible here, and why."""
    wanted = "\n".join((*NPM, PYPI))
    if STAMP.exists() and STAMP.read_text() == wanted:
        return 0
    npm = shutil.which("npm")
    if npm is None:
        print(f"npm is missing: node {NODE_MAJOR} or newer brings it", file=sys.stderr)
        return 1
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir()
    quiet = ("--no-audit", "--no-fund", "--loglevel", "error")
    subprocess.run((npm, "install", *quiet, "--prefix", PLACE, *NPM), check=True)
    subprocess.run((sys.executable, "-m", "venv", PLACE / "aider"), check=True)
    pip = (PLACE / "aider" / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    subprocess.run((*pip, PYPI), check=True)
    STAMP.write_text(wanted)
    return 0


def environment(home: Path) -> dict[str, str]:
    """Nothing of whoever runs the tests but where programs are."""
    quiet = {"NO_COLOR": "1", "TERM": "dumb", "CI": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1"}
    return {"PATH": os.environ["PATH"], "HOME": str(home), "LAB_KEY": "k", "OPENAI_API_KEY": "k", **quiet}


def call(tool: str, **arguments: Any) -> str:
    return f"[call {tool} {json.dumps(arguments)}]"


def program(name: str) -> str:
    return str(PLACE / "node_modules" / ".bin" / name)


# --- agents -----------------------------------------------------------------------------------------------------------


def codex(url: str, home: Path) -> list[Step]:
    """A session of tools, a resume with a sub-agent, and another resume."""
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(
        f'model = "{MODEL}"\nmodel_provider = "lab"\n[analytics]\nenabled = false\n'
        f'[model_providers.lab]\nname = "lab"\nbase_url = "{url}/v1"\nwire_api = "responses"\nenv_key = "LAB_KEY"\n'
    )
    run = (program("codex"), "exec")
    free = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    look = call("exec_command", cmd="cat notes.txt")
    spawn = call("spawn_agent", message=f"Look yourself. {look}")
    return [
        Step((*run, *free, f"Look at the notes. {' '.join([look] * 6)}")),
        Step((*run, "resume", "--last", *free, f"Now have it looked at. {spawn} {look} {look} {look}")),
        Step((*run, "resume", "--last", *free, f"And once more. {look} {look}")),
    ]


def claude_code(url: str, home: Path, model: str = MODEL) -> list[Step]:
    """A session of tools, one with a sub-agent, and another turn. Without a `model` it asks for those of its own."""
    del home
    models = dict.fromkeys(("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL"), model) if model else {}
    own = {"ANTHROPIC_API_KEY": "k", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "IS_SANDBOX": "1"}
    given = {"ANTHROPIC_BASE_URL": url, **models, **own}
    run = (program("claude"), "--dangerously-skip-permissions")
    look = call("Bash", command="cat notes.txt", description="notes")
    task = call("Agent", description="look", subagent_type="general-purpose", prompt=f"Look yourself. {look}")
    return [
        Step((*run, "-p", f"Look at the notes. {look} {look} {look}"), "", given),
        Step((*run, "--continue", "-p", f"Now have it looked at. {task} {look}"), "", given),
        Step((*run, "--continue", "-p", f"And once more. {look} {look}"), "", given),
    ]


def claude_code_by_its_names(url: str, home: Path) -> list[Step]:
    return claude_code(url, home, "")


def opencode(url: str, home: Path, npm: str = "@ai-sdk/openai-compatible") -> list[Step]:
    """By whichever API its provider has. It gives each session a title by a call of its own, without tools."""
    del home
    model = {"name": MODEL, "tool_call": True, "limit": {"context": 200_000, "output": 8192}}
    lab = {"npm": npm, "name": "lab", "options": {"baseURL": f"{url}/v1", "apiKey": "k"}, "models": {MODEL: model}}
    own = {"autoupdate": False, "share": "disabled", "permission": "allow", "provider": {"lab": lab}}
    config = json.dumps({**own, "model": f"lab/{MODEL}", "small_model": f"lab/{MODEL}"})
    given = {"OPENCODE_CONFIG_CONTENT": config, "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    look = call("bash", command="cat notes.txt", description="notes")
    task = call("task", description="look", subagent_type="general", prompt=f"Look yourself. {look}")
    run = (program("opencode"), "run")
    return [
        Step(run, f"Look at the notes. {look} {look} {call('glob', pattern='*.txt')}", given),
        Step((*run, "--continue"), f"Now have it looked at. {task} {look}", given),
        Step((*run, "--continue"), f"And once more. {look} {look}", given),
    ]


def opencode_by_messages(url: str, home: Path) -> list[Step]:
    return opencode(url, home, "@ai-sdk/anthropic")


def opencode_by_responses(url: str, home: Path) -> list[Step]:
    return opencode(url, home, "@ai-sdk/openai")


def qwen(url: str, home: Path) -> list[Step]:
    (home / ".qwen").mkdir()
    own = {"telemetry": {"enabled": False}, "privacy": {"usageStatisticsEnabled": False}}
    (home / ".qwen" / "settings.json").write_text(json.dumps(own))
    given = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_MODEL": MODEL}
    run = (program("qwen"), "--auth-type", "openai", "--yolo")
    look = call("run_shell_command", command="cat notes.txt", is_background=False)
    agent = call("agent", description="look", subagent_type="general-purpose", prompt=f"Look yourself. {look}")
    return [
        Step((*run, "-p", f"Look at the notes. {look} {look} {look}"), "", given),
        Step((*run, "--continue", "-p", f"Now have it looked at. {agent} {look}"), "", given),
        Step((*run, "--continue", "-p", f"And once more. {look} {look}"), "", given),
    ]


def aider(url: str, home: Path) -> list[Step]:
    """It has no tools, and puts its files before its last words: each turn repeats but a part of the one before."""
    del home
    quiet = ("--no-git", "--no-check-update", "--no-show-model-warnings", "--no-analytics", "--no-auto-lint")
    where = ("--model", f"openai/{MODEL}", "--openai-api-base", f"{url}/v1", "--openai-api-key", "k")
    own = ("--yes-always", "--restore-chat-history", "--map-tokens", "0", "notes.txt")
    run = (str(PLACE / "aider" / "bin" / "aider"), *where, *quiet, *own, "--message")
    return [Step((*run, words)) for words in ("Look at the notes.", "What is missing?", "Say it again.", "And now?")]


AGENTS: Mapping[str, Callable[[str, Path], list[Step]]] = {
    "codex": codex,
    "claude-code": claude_code,
    "opencode": opencode,
    "opencode-anthropic": opencode_by_messages,
    "opencode-responses": opencode_by_responses,
    "qwen": qwen,
    "aider": aider,
}

BY_TABLES: Mapping[str, Callable[[str, Path], list[Step]]] = {"claude-code-names": claude_code_by_its_names}
"""Those that engines would refuse without the tables of a node."""

if __name__ == "__main__":
    sys.exit(main())
