from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from common.tls import Certificates, TlsError, TlsFiles, certificates_ends_s
from tests.fakes.authority import Authority


def server_files(authority: Authority, name: str = "server") -> TlsFiles:
    pair = authority.issue(name)
    return TlsFiles(cert=pair.cert, key=pair.key, ca=authority.ca)


@pytest.mark.parametrize("days", [1, 400, 365 * 40])  # after 2049 certificates write years in full
def test_the_end_of_a_certificate_is_read_from_its_bytes(authority: Authority, days: int) -> None:
    pair = authority.issue("server", ends_in=timedelta(days=days))
    wanted = datetime.now(UTC).timestamp() + days * 86400
    (end,) = certificates_ends_s(pair.cert.read_bytes())
    assert abs(end - wanted) < 600


def test_of_a_chain_the_first_end_counts(authority: Authority) -> None:
    pair = authority.issue("server")
    own_end = certificates_ends_s(pair.cert.read_bytes())[0]
    with pair.cert.open("ab") as file:
        file.write(authority.ca.read_bytes())
    assert len(certificates_ends_s(pair.cert.read_bytes())) == 2
    assert Certificates(TlsFiles(cert=pair.cert, key=pair.key)).expires_s() == own_end


def test_nothing_new_is_the_same_object(authority: Authority) -> None:
    certificates = Certificates(server_files(authority))
    assert certificates.current() is certificates.current()


def test_a_replaced_certificate_is_used_at_the_next_look(authority: Authority) -> None:
    certificates = Certificates(server_files(authority))
    before = certificates.current()
    pair = authority.issue("server", ends_in=timedelta(days=90))
    assert certificates.current() is not before
    assert certificates.current().cert == pair.cert.read_bytes()
    assert certificates.expires_s() > (before.expires_s or 0) + 50 * 86400


def test_a_volume_of_kubernetes_is_seen_to_change(tmp_path: Path) -> None:
    """A Secret is files that are links into ``..data``, itself a link that is renamed in one step."""

    def publish(revision: str) -> None:
        folder = tmp_path / revision
        folder.mkdir()
        pair = Authority(folder).issue("tls")
        pair.cert.rename(folder / "tls.crt")
        pair.key.rename(folder / "tls.key")
        (tmp_path / "..data_tmp").symlink_to(revision)
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")

    publish("..2026_01_01")
    for name in ("tls.crt", "tls.key"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    certificates = Certificates(TlsFiles(cert=tmp_path / "tls.crt", key=tmp_path / "tls.key"))
    before = certificates.current()
    publish("..2026_01_02")
    assert certificates.current().cert == (tmp_path / "..2026_01_02/tls.crt").read_bytes() != before.cert


@pytest.mark.parametrize("damage", ["half a certificate", "another key", "nothing", "an ended one"])
def test_new_files_that_cannot_be_used_change_nothing_and_are_named_once(
    authority: Authority, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    files = server_files(authority)
    certificates = Certificates(files)
    before = certificates.current()
    cert, key = files.cert, files.key
    assert cert is not None
    assert key is not None
    match damage:
        case "half a certificate":
            cert.write_bytes(cert.read_bytes()[:300])
        case "another key":
            authority.issue("other").key.replace(key)
        case "nothing":
            key.unlink()
        case "an ended one":
            authority.issue("server", ends_in=timedelta(days=-1))
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            assert certificates.current() is before
    (record,) = caplog.records
    assert record.getMessage().startswith("the certificate in use stays: --tls-")

    authority.issue("server")
    assert certificates.current() is not before


def test_files_that_are_replaced_one_after_the_other_are_no_fault(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    files = server_files(authority)
    certificates = Certificates(files)
    before = certificates.current()
    new = authority.issue("new")
    new.cert.replace(files.cert or "")
    assert certificates.current() is before
    new.key.replace(files.key or "")
    assert certificates.current() is not before
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_what_cannot_be_used_at_the_start_is_named_with_its_flag(authority: Authority, tmp_path: Path) -> None:
    server = authority.issue("server")
    cert, key = server.cert, server.key
    other = authority.issue("other")
    ended = authority.issue("ended", ends_in=timedelta(hours=-1))
    rubbish = tmp_path / "rubbish.pem"
    rubbish.write_text("-----BEGIN CERTIFICATE-----\nbm90aGluZw==\n-----END CERTIFICATE-----\n")
    locked = tmp_path / "locked.key"
    locked.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\nbm90aGluZw==\n-----END ENCRYPTED PRIVATE KEY-----\n")
    wrong = [
        (TlsFiles(cert=Path("/nowhere.pem"), key=key), "--tls-cert /nowhere.pem cannot be read: No such file"),
        (TlsFiles(cert=cert, key=Path("/nowhere.key")), "--tls-key /nowhere.key cannot be read: No such file"),
        (TlsFiles(cert=key, key=key), "there is no certificate in PEM in it"),
        (TlsFiles(cert=cert, key=cert), "there is no private key in PEM in it"),
        (TlsFiles(cert=cert, key=other.key), f"--tls-key {other.key} is not its key"),
        (TlsFiles(cert=cert, key=locked), "is encrypted: give a key without a passphrase"),
        (TlsFiles(cert=ended.cert, key=ended.key), " ended on "),
        (TlsFiles(cert=cert, key=key, ca=key), f"--tls-client-ca {key}: there is no certificate in PEM in it"),
        (TlsFiles(cert=rubbish, key=key), "a certificate in it cannot be read"),
        (TlsFiles(cert=cert, key=key, ca=rubbish), "a certificate in it cannot be read"),
    ]
    for files, message in wrong:
        with pytest.raises(TlsError) as caught:
            Certificates(files)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_key_that_every_user_can_read_is_warned_of(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    files = server_files(authority)
    assert files.key is not None
    files.key.chmod(0o640)
    Certificates(files)
    assert not caplog.records
    files.key.chmod(0o644)
    Certificates(files)
    assert f"--tls-key {files.key} can be read by every user of this machine: chmod 600" in caplog.text
