"""Certificates of our servers and clients: read from PEM files, checked, and read again when the files change.

Whoever opens a connection asks ``Certificates.current`` first: some ``stat`` calls tell whether a file was replaced, by
a rename or by the symbolic links of a Kubernetes volume. So a new certificate serves the next connection, and those
that run keep theirs. New files that cannot be used change nothing and are named in the log, once.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import grpc

log = logging.getLogger(__name__)

LOOK_PERIOD_S = 1.0

_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_KEY = re.compile(rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY-----")
_Stamp: TypeAlias = tuple[tuple[int, ...], ...]
_READABLE_BY_OTHERS = 0o004
_EXPLICIT_0, _UTC_TIME = 0xA0, 0x17  # tags of DER


class TlsError(ValueError):
    """A file that cannot be used. The message names the flag, the file and what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """What one side of a connection shows, and whom it believes.

    ``flags`` are the names under which messages speak of certificate, key and authority.
    """

    cert: Path | None = None  # own chain, leaf first
    key: Path | None = None
    ca: Path | None = None  # authority that the other side's certificate must come from
    flags: tuple[str, str, str] = ("--tls-cert", "--tls-key", "--tls-client-ca")

    @classmethod
    def of_server(cls, cert: Path | None, key: Path | None, client_ca: Path | None) -> TlsFiles | None:
        """Of a server that asks clients for a certificate where there is ``client_ca``; None when none is given."""
        return cls(cert=cert, key=key, ca=client_ca) if (cert, key, client_ca) != (None, None, None) else None

    @classmethod
    def of_worker_client(cls, ca: Path | None, cert: Path | None, key: Path | None) -> TlsFiles | None:
        """Of a client of workers; None when none is given."""
        flags = ("--worker-client-cert", "--worker-client-key", "--worker-ca")
        return cls(cert=cert, key=key, ca=ca, flags=flags) if (ca, cert, key) != (None, None, None) else None

    def check_server(self) -> None:
        """Raises ``TlsError`` when something is missing that a server needs."""
        self._check_pair()
        if self.cert is None:
            raise TlsError(f"{self.flags[2]} needs {self.flags[0]} and {self.flags[1]}: it says whom TLS lets in")

    def check_client(self) -> None:
        """Raises ``TlsError`` when something is missing that a client needs."""
        self._check_pair()
        if self.ca is None:
            raise TlsError(f"{self.flags[0]} needs {self.flags[2]}: it says whom to show it to")

    def _check_pair(self) -> None:
        cert_flag, key_flag, _ = self.flags
        if (self.cert is None) != (self.key is None):
            given, missing = (cert_flag, key_flag) if self.key is None else (key_flag, cert_flag)
            raise TlsError(f"{given} needs {missing}: a certificate and its key come together")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Identity:
    """Files of one moment that fit each other."""

    cert: bytes | None  # PEM
    key: bytes | None
    ca: bytes | None
    expires_s: float | None  # since 1970: when the first certificate of the own chain ends
    context: ssl.SSLContext  # of a server that shows them


class Certificates:
    """The newest good content of some files, for any thread. Raises ``TlsError`` where there is none to begin with."""

    def __init__(self, files: TlsFiles) -> None:
        self.files = files
        self._lock = threading.Lock()
        self._stamp = self._look()
        self._identity = self._read()
        self._suspect: object = None  # what a look has found to be bad: perhaps half written
        self._refused: object = None  # what the next one found unchanged

    def current(self) -> Identity:
        """The same object as before while nothing has changed."""
        with self._lock:
            stamp = self._look()
            if stamp not in (self._stamp, self._refused):
                self._take(stamp)
            return self._identity

    async def follow(self) -> None:
        """Look now and then, until cancelled, so that the log tells of bad files before the next client comes."""
        while True:
            await asyncio.sleep(LOOK_PERIOD_S)
            self.current()

    def expires_s(self) -> float:
        """When the own certificate ends, in seconds since 1970; 0 where there is none."""
        return self.current().expires_s or 0.0

    def _take(self, stamp: _Stamp) -> None:
        try:
            identity = self._read()
        except TlsError as error:
            if stamp == self._suspect:
                self._refused = stamp
                log.error("the certificate in use stays: %s", error)
            self._suspect = stamp
            return
        self._identity, self._stamp = identity, stamp
        self._suspect = self._refused = None
        log.info("certificates were read anew cert=%s ca=%s", self.files.cert, self.files.ca)

    def _look(self) -> _Stamp:
        """What changes when a file does: device, inode, time and size behind all links; nothing where there is none."""
        stamps = []
        for path in (self.files.cert, self.files.key, self.files.ca):
            try:
                stat = path.stat() if path is not None else None
            except OSError:
                stat = None
            stamps.append((stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size) if stat is not None else ())
        return tuple(stamps)

    def _read(self) -> Identity:
        try:
            return self._checked()
        except OSError as error:  # a file went between two looks at it
            raise TlsError(f"{error.filename} cannot be read: {error.strerror}") from error

    def _checked(self) -> Identity:
        files = self.files
        cert_flag, key_flag, ca_flag = files.flags
        before = self._look()
        cert, key, ca = _content(cert_flag, files.cert), _content(key_flag, files.key), _content(ca_flag, files.ca)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        expires_s = None
        if cert is not None and key is not None:
            expires_s = _first_end(cert, f"{cert_flag} {files.cert}")
            if not _KEY.search(key):
                raise TlsError(f"{key_flag} {files.key}: there is no private key in PEM in it")
            if b"ENCRYPTED" in key:
                raise TlsError(f"{key_flag} {files.key} is encrypted: give a key without a passphrase, of mode 600")
            if files.key is not None and files.key.stat().st_mode & _READABLE_BY_OTHERS:
                log.warning("%s %s can be read by every user of this machine: chmod 600", key_flag, files.key)
            try:
                context.load_cert_chain(str(files.cert), str(files.key))
            except ssl.SSLError as error:
                wrong = "is not its key" if error.reason == "KEY_VALUES_MISMATCH" else f"cannot be used: {error.reason}"
                raise TlsError(f"{cert_flag} {files.cert}: {key_flag} {files.key} {wrong}") from error
        if ca is not None:
            _first_end(ca, f"{ca_flag} {files.ca}", must_hold=False)
            try:
                context.load_verify_locations(str(files.ca))
            except ssl.SSLError as error:
                raise TlsError(f"{ca_flag} {files.ca} cannot be used: {error.reason}") from error
            context.verify_mode = ssl.CERT_REQUIRED
        if self._look() != before:
            raise TlsError(f"{cert_flag} {files.cert} and what belongs to it are being replaced")
        return Identity(cert=cert, key=key, ca=ca, expires_s=expires_s, context=context)


def grpc_server_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Of a gRPC server; asks clients for a certificate where an authority is given. gRPC's floor is TLS 1.2."""
    shown = certificates.current()

    def of(identity: Identity) -> Any:
        pairs: Any = [(identity.key, identity.cert)]
        return grpc.ssl_server_certificate_configuration(pairs, root_certificates=identity.ca)

    def newer() -> Any:  # before every handshake; None: no change
        nonlocal shown
        before, shown = shown, certificates.current()
        return None if shown is before else of(shown)

    must_prove = certificates.files.ca is not None
    return grpc.dynamic_ssl_server_credentials(of(shown), newer, require_client_authentication=must_prove)


def grpc_channel_credentials(identity: Identity) -> grpc.ChannelCredentials:
    """Of a gRPC client that believes ``identity.ca``, and shows its own certificate where it has one."""
    return grpc.ssl_channel_credentials(identity.ca, identity.key, identity.cert)


class ServerContext(ssl.SSLContext):
    """For a server of asyncio: gives every new connection the newest certificate."""

    _certificates: Certificates

    @classmethod
    def of(cls, certificates: Certificates) -> ServerContext:
        """A context with no certificate of its own."""
        self = cls(ssl.PROTOCOL_TLS_SERVER)
        self._certificates = certificates
        return self

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """The beginning of a connection."""
        return self._certificates.current().context.wrap_bio(*args, **kwargs)


def certificates_ends_s(pem: bytes) -> list[float]:
    """When each certificate in a PEM file ends, in seconds since 1970. Raises ``ValueError`` for what is none."""
    return [_not_after_s(ssl.PEM_cert_to_DER_cert(block.decode("ascii"))) for block in _CERTIFICATE.findall(pem)]


def _content(flag: str, path: Path | None) -> bytes | None:
    try:
        return path.read_bytes() if path is not None else None
    except OSError as error:
        raise TlsError(f"{flag} {path} cannot be read: {error.strerror}") from error


def _first_end(pem: bytes, what: str, *, must_hold: bool = True) -> float:
    """When the first of these certificates ends. Raises ``TlsError`` when there is none or that has passed."""
    try:
        ends_s = min(certificates_ends_s(pem), default=None)
    except (ValueError, IndexError) as error:
        raise TlsError(f"{what}: a certificate in it cannot be read") from error
    if ends_s is None:
        raise TlsError(f"{what}: there is no certificate in PEM in it")
    if must_hold and ends_s <= time.time():
        raise TlsError(f"{what} ended on {datetime.fromtimestamp(ends_s, UTC):%Y-%m-%d %H:%M} UTC: give a new one")
    return ends_s


def _not_after_s(der: bytes) -> float:
    """The end of a certificate's validity; Python's ssl tells it of peers only. RFC 5280, section 4.1.

    Certificate ::= SEQUENCE { tbs SEQUENCE { [0] version OPTIONAL, serial, signature, issuer, validity SEQUENCE {
    notBefore, notAfter }, ... }, ... }
    """
    certificate = _elements(der)[0][1]
    tbs = _elements(_elements(certificate)[0][1])
    if tbs[0][0] == _EXPLICIT_0:
        del tbs[0]
    tag, text = _elements(tbs[3][1])[1]
    form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    return datetime.strptime(text.decode("ascii"), form).replace(tzinfo=UTC).timestamp()


def _elements(der: bytes) -> list[tuple[int, bytes]]:
    """Tag and content of each element in a row of DER. Raises ``ValueError`` for what ends too soon."""
    found = []
    position = 0
    while position < len(der):
        if position + 2 > len(der):
            raise ValueError("DER ends inside a head")
        tag, length = der[position], der[position + 1]
        position += 2
        if length & 0x80:
            num_bytes = length & 0x7F
            length = int.from_bytes(der[position : position + num_bytes], "big")
            position += num_bytes
        if position + length > len(der):
            raise ValueError("DER ends inside an element")
        found.append((tag, der[position : position + length]))
        position += length
    return found
