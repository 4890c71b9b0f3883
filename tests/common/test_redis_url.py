from __future__ import annotations

from pathlib import Path

import pytest

from common.redis_url import RedisUrl, RedisUrlError, parse_redis_url


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("redis://host", RedisUrl(kind="single", is_tls=False, nodes=(("host", 6379),))),
        (
            "rediss://u:p%40ss@[::1]:7000/3?ssl_ca_certs=/ca.pem",
            RedisUrl(
                kind="single",
                is_tls=True,
                nodes=(("::1", 7000),),
                db=3,
                user="u",
                password="p@ss",
                options={"ssl_ca_certs": "/ca.pem"},
            ),
        ),
        (
            "redis+sentinel://u:p@a,b:7,[::1]/main/2?sentinel_user=s&sentinel_password_file=/s",
            RedisUrl(
                kind="sentinel",
                is_tls=False,
                nodes=(("a", 26379), ("b", 7), ("::1", 26379)),
                service="main",
                db=2,
                user="u",
                password="p",
                options={"sentinel_user": "s", "sentinel_password_file": "/s"},
            ),
        ),
        (
            "rediss+cluster://:p@a:1,b",
            RedisUrl(kind="cluster", is_tls=True, nodes=(("a", 1), ("b", 6379)), password="p"),
        ),
    ],
)
def test_urls_are_read(url: str, wanted: RedisUrl) -> None:
    assert parse_redis_url(url) == wanted


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://u:secret@host", "scheme 'http' is none of redis, rediss"),
        ("secret@host", "is none of redis"),
        ("redis:host", "is none of redis"),
        ("redis://", "a host is missing"),
        ("redis://:secret@a,b", "names one server"),
        ("redis://a:port", "'a:port' is no host:port"),
        ("redis://:secret@a:70000", "'a:70000' is no host:port"),
        ("redis://a/b", "ends in the number of a database"),
        ("redis+sentinel://:secret@a", "needs the master's name"),
        ("redis+sentinel://a/main/x", "the number of a database"),
        ("redis+cluster://a/1", "database 0 only"),
        ("redis://a?ssl_ca_certs=/x", "redis:// has no option 'ssl_ca_certs'"),
        ("rediss://a?password=secret", "rediss:// has no option 'password'; it knows ssl_ca_certs, ssl_certfile"),
        ("redis://[::1", "'[::1' is no host:port"),
        ("redis://u:[secret@host:x", "'host:x' is no host:port"),
        ("redis://:a/secret@host", "percent-encoded"),
        ("redis://:a?secret@host", "percent-encoded"),
    ],
)
def test_what_cannot_be_used_is_named_without_the_password(url: str, words: str) -> None:
    with pytest.raises(RedisUrlError) as caught:
        parse_redis_url(url)
    assert words in str(caught.value)
    assert "secret" not in str(caught.value).replace("'secret@host'", "")


def test_a_password_stands_in_the_url_or_in_a_file_and_never_in_what_is_printed(tmp_path: Path) -> None:
    file = tmp_path / "password"
    with_password = parse_redis_url("redis://u:secret@a")
    assert "secret" not in repr(with_password)
    with pytest.raises(RedisUrlError, match="cannot be read"):
        parse_redis_url("redis://a").check_password_file(file)
    file.write_text("\n")
    with pytest.raises(RedisUrlError, match="is empty"):
        parse_redis_url("redis://a").check_password_file(file)
    file.write_text("other\n")
    parse_redis_url("redis://a").check_password_file(file)
    with pytest.raises(RedisUrlError, match="give one of them"):
        with_password.check_password_file(file)
