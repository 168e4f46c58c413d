"""How a node makes fingerprints: from which secret, with which tokenizer, and with whom it can share routes."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from hashlib import blake2b

import trio

from ranvier_py.config.config_model import Config
from ranvier_py.core.prompts.fingerprint import UNCOMPUTED_TOKENS
from ranvier_py.core.tokenize.tokenize_frames import Setup
from ranvier_py.core.tokenize.tokenize_job import TokenizerFacts
from ranvier_py.io.keys import KeyFile, Keys, insecure_keys, keys_of
from ranvier_py.io.tokenizer_process import TokenizerProcess

COMMON_KEY = bytes(32)
"""Names tenants on nodes that share answers but no secret. Whoever reads Redis can read the answers anyway."""

FINGERPRINT_VERSION = b"2"
"""Version of how fingerprints are made from tokens and texts: raise it if core/prompts/fingerprint.py alters them."""


@dataclass(frozen=True, slots=True)
class FingerprintScheme:
    """How a node makes fingerprints. `identity` names tokenizer, template and block size."""

    identity: str
    key: bytes
    texts_match: bool

    @property
    def schema(self) -> int:
        """A number that is equal for nodes that make equal fingerprints of equal prompts; only such nodes can use each
        other's routes."""
        parts = (FINGERPRINT_VERSION, self.identity.encode(), self.key, b"%d" % self.texts_match)
        whole = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        return int.from_bytes(blake2b(whole, digest_size=8, person=b"schema").digest(), "little")


async def load_keys(config: Config) -> tuple[Keys, KeyFile | None]:
    """Return the cluster's keys, and the file that they are read from, if any. Raises ConfigError."""
    if config.worker_key is not None:
        return keys_of(config.worker_key), None
    if config.cluster_key_file is None:
        return insecure_keys(config.cluster_name), None
    file = await trio.to_thread.run_sync(KeyFile, config.cluster_key_file, lambda _: None)
    return file.keys, file


def fingerprint_key(config: Config, shared: bytes | None) -> bytes:
    """Return the key of fingerprints: from the operator's secret, else from the peers', else from a random one."""
    given = config.cluster_secret.get_secret_value().encode() if config.cluster_secret else None
    secret = given or shared or secrets.token_bytes(32)
    return blake2b(secret, digest_size=32, person=b"fingerprint").digest()  # secrets have any length, keys have one


def scheme_of(config: Config, facts: TokenizerFacts, key: bytes) -> FingerprintScheme:
    """Return how this node makes fingerprints."""
    return FingerprintScheme(f"{facts.identity}/{config.block_size_tokens}", key, facts.keeps_turns)


def tokenizer_process(config: Config, key: bytes) -> TokenizerProcess:
    template = str(config.chat_template or "")
    return TokenizerProcess(Setup(config.tokenizer, template, key, config.block_size_tokens, UNCOMPUTED_TOKENS))


def has_shared_key(config: Config) -> bool:
    """Whether nodes on several machines make fingerprints with the same key."""
    return bool(config.cluster_secret or config.cluster_key_file or config.insecure_gossip)
