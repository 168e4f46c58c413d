"""Types of ids that are numbers."""

from typing import NewType

BackendId = NewType("BackendId", int)
"""Index of a backend in this node's registry: 0 … 4095. Other nodes do not know it; they use the backend's name."""

Fingerprint = NewType("Fingerprint", int)
"""Unsigned 64-bit keyed hash of a whole prefix up to one depth. 0 stands for «not known»."""

UNKNOWN = Fingerprint(0)
