"""What `config --check` looks at beyond the values: every file that a node would open, and who can read its keys.

Nothing is written or created, and nobody is asked: a tokenizer of a hub is named as not tried.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from ranvier_py.config.backend_files import read_backend_file
from ranvier_py.config.config_endpoints import numbered
from ranvier_py.config.config_loader import Loaded
from ranvier_py.config.config_model import KEYS, SECRETS, Config
from ranvier_py.config.key_files import read_key_file
from ranvier_py.core.errors import ConfigError
from ranvier_py.io.gossip.state_file import is_something_else
from ranvier_py.io.keys import read_keys, rotation_advice
from ranvier_py.io.recorder import check_recording
from ranvier_py.io.tokenizer import check_files, is_on_hub
from ranvier_py.node.parts.response_parts import redis_pools_of
from ranvier_py.node.parts.tls_parts import CONTROL, PUBLIC, UPSTREAM, engine_context_of, tls_context
from ranvier_py.node.tracing.trace_parts import OTEL_FILES, check_traces

KEY_FILES = (
    *(f"{name}_file" for name in SECRETS),
    "cluster_key_file",
    "tls_key_file",
    "control_tls_key_file",
    "upstream_key_file",
)


def check_backends(path: Path, key: str) -> None:
    """Raise ConfigError if backends can't be read from this file."""
    try:
        read_backend_file(path)
    except ConfigError as error:
        raise ConfigError([f"{key}: {problem}" for problem in error.problems]) from error


def check_folder(path: Path, key: str) -> None:
    """Raise ConfigError if nothing can be written into this folder, which need not be there yet."""
    place = next(each for each in (path, *path.parents) if each.exists() or each == each.parent)
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError([f"{key}: {path} can't be written: {place} is no folder to write to"])


READERS: Mapping[str, Callable[[Path, str], object]] = {
    "keys_file": read_key_file,
    "control_keys_file": read_key_file,
    "backends_file": check_backends,
    "state_folder": check_folder,
}


def file_problems(config: Config) -> Iterator[str]:
    """Yield «key: what is wrong» for each file or URL that can't be used, of the keys that are good."""
    checks: list[Callable[[], object]] = [partial(redis_pools_of, config)]
    made = ((UPSTREAM, engine_context_of), (OTEL_FILES, check_traces))
    checks += [partial(check_made, config, names, make) for names, make in made]
    template = str(config.chat_template or "")
    checks += [partial(check_files, config.tokenizer, ""), partial(check_files, "embedded", template)]
    for names in (PUBLIC, CONTROL):
        if all(KEYS[name].value_in(config) is not None for name in names[:2]):
            checks.append(partial(tls_context, config, names))
        else:
            checks += [partial(check_readable, config, name) for name in names]
    for kind, read in READERS.items():
        if (path := KEYS[kind].value_in(config)) is not None:
            checks.append(partial(read, path, kind))
    if config.cluster_key_file is not None:
        checks.append(partial(read_keys, config.cluster_key_file))
    for index in range(config.workers):
        record, *states = (
            numbered(file, index) if config.workers > 1 else file
            for file in (config.record_file, config.gossip_state_file, config.limit_state_file)
        )
        if record is not None:
            checks.append(partial(check_recording, record))
        for name, state in zip(("gossip_state_file", "limit_state_file"), states, strict=True):
            if state is not None:
                checks.append(partial(check_state, name, state))
    for check in checks:
        try:
            check()
        except ConfigError as error:
            yield from error.problems


def check_readable(config: Config, name: str) -> None:
    """Raise ConfigError if the file of this key is set and can't be opened."""
    path: Path | None = KEYS[name].value_in(config)
    if path is not None:
        try:
            path.open("rb").close()
        except OSError as error:
            raise ConfigError([f"{name}: {path} can't be read: {error.strerror}"]) from error


def check_made(config: Config, names: Sequence[str], make: Callable[[Config], object]) -> None:
    """Raise ConfigError if the files of these keys can't be opened, or what is made of them can't be used."""
    for name in names:
        check_readable(config, name)
    make(config)


def check_state(name: str, path: Path) -> None:
    """Raise ConfigError if state can't be read from this file, or written to it."""
    try:
        if is_something_else(path):
            raise ConfigError([f"{name}: {path} is no regular file"])
        with suppress(FileNotFoundError):
            path.open("rb").close()
    except OSError as error:
        raise ConfigError([f"{name}: {path} can't be read: {error.strerror}"]) from error
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError([f"{name}: {path} can't be written: {path.parent} is no folder to write to"])


def file_notes(loaded: Loaded, file: Path | None) -> Iterator[str]:
    """Yield what an operator should know of these files; `file` is that of the configuration."""
    config, origins, _ = loaded
    keys: dict[Path, str] = {}
    if file is not None and any(origins.get(name, "").startswith(str(file)) for name in SECRETS):
        keys[file] = "a secret is in the configuration itself"
    keys |= {path: name for name in KEY_FILES if (path := KEYS[name].value_in(config)) is not None}
    own = [(place, Path(spec.api_key_file)) for place, spec in enumerate(config.backend) if spec.api_key_file]
    keys |= {path: f"backend[{place}].api_key_file" for place, path in own}
    for path, name in keys.items():
        with suppress(OSError):  # reported where it was opened
            mode = path.stat().st_mode
            if mode & stat.S_IROTH:
                yield f"{name}: every user of this machine can read {path}: chmod o= {path}"
            elif mode & stat.S_IWOTH:
                yield f"{name}: every user of this machine can write {path}: chmod o= {path}"
    if config.cluster_key_file is not None:
        with suppress(ConfigError):
            if advice := rotation_advice(read_keys(config.cluster_key_file), config.cluster_key_file):
                yield f"cluster_key_file: {advice}"
    if is_on_hub(config.tokenizer):
        yield f"tokenizer: {config.tokenizer} is the id of a hub and was not tried: a node loads it when it starts"
