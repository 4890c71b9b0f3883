"""A certificate authority of a test's own: real certificates and keys in real files."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as files."""

    cert: Path
    key: Path


class Authority:
    """Issues certificates into ``folder``; writing a pair again replaces its files as `mv` would."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._authority = trustme.CA()
        self._folder = folder
        self.ca = folder / f"{name}.pem"
        self._authority.cert_pem.write_to_path(self.ca)

    def issue(self, name: str, *hosts: str, ends_in: timedelta = timedelta(days=30)) -> Pair:
        """A pair of files for ``hosts``, by default this machine's."""
        ends = datetime.now(UTC) + ends_in
        issued = self._authority.issue_cert(*(hosts or ("127.0.0.1", "localhost")), not_after=ends)
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        for path, content in (
            (pair.cert, b"".join(blob.bytes() for blob in issued.cert_chain_pems)),
            (pair.key, issued.private_key_pem.bytes()),
        ):
            new = path.with_suffix(".new")
            new.write_bytes(content)
            new.chmod(0o600)
            new.replace(path)
        return pair
