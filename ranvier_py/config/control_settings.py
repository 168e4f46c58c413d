"""The settings of the control port."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field

from ranvier_py.config.config_model import Config
from ranvier_py.core.access.key_table import KeyTable
from ranvier_py.core.addresses import host_port


@dataclass(slots=True)
class ControlSettings:
    """Where and to whom the control port answers, and what one client may use up. Port 0 takes any free one.

    `key`, `keys`, `tls` and `metrics_public` may change while the port is served; the next request or connection uses
    the new values. `has_file`: whether `keys` come from a file.
    """

    host: str
    port: int
    key: str | None = None
    metrics_public: bool = False
    keys: KeyTable = field(default_factory=KeyTable)
    has_file: bool = False
    tls: ssl.SSLContext | None = None
    body_bytes_max: int = 16 * 1024 * 1024  # a prompt to explain is parsed on the event loop
    idle_timeout_s: float = 5.0  # also for the header of a request to arrive
    send_timeout_s: float = 30.0  # for one piece of an answer
    close_grace_s: float = 1.0  # for answers under way when the node ends; all are short

    @property
    def needs_key(self) -> bool:
        return bool(self.key) or self.has_file

    def take_keys(self, keys: KeyTable) -> None:
        self.keys = keys


def control_settings(config: Config) -> ControlSettings:
    host, port = host_port(config.control)
    key = config.control_key.get_secret_value() if config.control_key else None
    has_file = config.ports.control_keys_file is not None
    return ControlSettings(host=host, port=port, key=key, metrics_public=config.metrics_public, has_file=has_file)
