"""Who may connect to either port, and who may ask for what at the control port."""

from __future__ import annotations

from dataclasses import dataclass

from ranvier_py.config.config_values import Networks, OptionalPath, key
from ranvier_py.core.options import Options


@dataclass(frozen=True, slots=True)
class PortSecurity(Options):
    """Certificates of clients, who may name tenants, and TLS and keys of the control port."""

    tls_client_ca_file: OptionalPath = key(
        None, "Ports", "PEM certificates of the authorities whose clients alone may connect; without, all may."
    )
    control_tls_certificate_file: OptionalPath = key(
        None, "Ports", "PEM certificate chain of the control port; turns TLS on."
    )
    control_tls_key_file: OptionalPath = key(None, "Ports", "PEM private key that belongs to that certificate.")
    control_client_ca_file: OptionalPath = key(None, "Ports", "As tls_client_ca_file, of the control port.")
    control_keys_file: OptionalPath = key(
        None,
        "Access",
        "File of keys of the control port, as keys_file, each with a role: read sees all, operate also drains engines "
        "and empties caches, admin does everything. control_key stays one of role admin. Each order's line in the log "
        "names the key by its id.",
    )
    trusted_proxies: Networks = key(
        (),
        "Access",
        "Addresses or networks of the proxies whose field names the tenant (tenant_isolation = header:NAME), and whose "
        "X-Forwarded-For names the client in the log; from any other address the former is removed. Not set: all are "
        "believed about the tenant without a keys_file, none with one.",
    )
