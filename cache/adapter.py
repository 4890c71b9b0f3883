"""Which LoRA adapter a request is computed with: the identity that router and worker put into block hashes.

The version is the digest of the adapter's content. Under one name other weights therefore give other hashes, and KV of
the old ones is never taken for that of the new ones; equal content has equal hashes wherever it lies.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_NAME_LENGTH = 128
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._:/-]{{0,{MAX_NAME_LENGTH - 1}}}")


class Adapter(NamedTuple):
    """Name and version: the two that ``extra_keys`` takes as ``lora``."""

    name: str
    version: str  # SHA-256 of its files, 64 hex digits

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"

    @classmethod
    def parse(cls, text: str) -> Adapter:
        """What ``str`` made of one. A text without a version has an empty one."""
        name, _, version = text.partition("@")
        return cls(name, version)


def is_adapter_name(name: str) -> bool:
    """Whether an adapter may be called so: up to 128 letters, digits and . _ : / - with a letter or digit first."""
    return _NAME.fullmatch(name) is not None
