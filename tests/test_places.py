"""Where lower tiers are, as operators write it: what is understood, what is refused, and that no secret is repeated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import ConfigError
from headwater.places import DiskSpec, RemoteSpec, mask, parse_disk, parse_remote

GOOD: list[tuple[str, dict[str, object]]] = [
    ("redis://kv", {"scheme": "redis", "name": "redis://kv:6379", "host": "kv", "port": 6379, "database": 0}),
    ("valkey://kv:7000/3", {"name": "valkey://kv:7000/3", "port": 7000, "database": 3}),
    ("redis://[::1]:7000", {"name": "redis://[::1]:7000", "host": "::1", "port": 7000}),
    ("rediss://u:p%40%2F@kv", {"user": "u", "password": "p@/", "name": "rediss://kv:6379", "has_tls": True}),
    ("valkeys://:p@kv?ca=/etc/ca.pem", {"user": "", "password": "p", "ca": "/etc/ca.pem", "has_tls": True}),
    ("redis+unix:///run/x.sock?db=2", {"path": "/run/x.sock", "database": 2, "has_tls": False}),
    (
        "redis://kv?ttl=2h&cluster=blue&connections=4&capacity=8GiB&codec=zstd%2Baes&admission=reused",
        {
            "ttl_s": 7200.0,
            "cluster": "blue",
            "connections": 4,
            "capacity_bytes": 8 << 30,
            "codec": "zstd+aes",
            "admission": "reused",
        },
    ),
    ("s3://bucket", {"scheme": "s3", "name": "s3://bucket", "host": "bucket", "path": ""}),
    (
        "s3://key:secret@bucket/a/b/?endpoint=http://10.0.0.5:9000/&region=eu-1",
        {
            "name": "s3://bucket/a/b",
            "path": "a/b",
            "endpoint": "http://10.0.0.5:9000",
            "region": "eu-1",
            "user": "key",
            "password": "secret",
        },
    ),
    ("gcs://bucket/p", {"scheme": "gs", "name": "gs://bucket/p"}),
    ("azure://box/p?account=acc", {"scheme": "az", "account": "acc"}),
    ("file:///shared/nfs/", {"scheme": "file", "path": "/shared/nfs", "name": "file:///shared/nfs"}),
    ("FILE:///shared/a%20b", {"path": "/shared/a b"}),
    ("file:///shared/nfs?shared=true", {"shared": True, "name": "file:///shared/nfs"}),
]


@pytest.mark.parametrize(("url", "expected"), GOOD, ids=[it[0] for it in GOOD])
def test_what_is_understood(url: str, expected: dict[str, object]) -> None:
    spec = parse_remote(url)
    assert {name: getattr(spec, name) for name in expected} == expected
    assert parse_remote(spec) is spec
    assert parse_remote(spec.url) == spec
    assert spec.is_redis == spec.scheme.startswith(("redis", "valkey"))


BAD: list[tuple[str, str]] = [
    ("", "not a URL"),
    ("kv:6379", "not a URL"),
    ("redi://kv", "nearest known one is 'redis'"),
    ("http://kv", "unknown scheme 'http'"),
    ("redis://", "host is missing"),
    ("redis://kv:port", "host and port"),
    ("redis://kv:99999", "host and port"),
    ("redis://[::1", "host and port"),
    ("redis://kv/db", "number of a database"),
    ("redis://kv/-1", "number of a database"),
    ("redis://kv#x", "%23"),
    ("redis://kv?tll=1h", "nearest is 'ttl'"),
    ("redis://kv?TTL=1h", "no option 'TTL'"),
    ("redis://kv?ttl", "option=value"),
    ("redis://kv?ttl=1h&ttl=2h", "given twice"),
    ("redis://kv?ttl=0", "not a duration"),
    ("redis://kv?ttl=-1h", "not a duration"),
    ("redis://kv?connections=0", "from 1 to 64"),
    ("redis://kv?capacity=5", "least of 1MiB"),
    ("redis://kv?cluster=a:b", "name of up to 64"),
    ("redis://kv?cluster=a*", "name of up to 64"),
    ("redis://kv?admission=some", "not one of all, reused, auto"),
    ("redis://kv?codec=../x", "name of a codec"),
    ("redis://kv?ca=/x", "no option 'ca'"),
    ("rediss://kv?ca=x.pem", "absolute path"),
    ("redis://kv?db=1", "no option 'db'"),
    ("redis+unix://kv/run/x", "absolute path of a socket"),
    ("s3://", "name of a bucket"),
    ("s3://bucket:9000/x", "goes into .endpoint="),
    ("s3://bu_cket*/x", "name of a bucket"),
    ("s3://bucket/../x", "'..'"),
    ("s3://bucket?ttl=1h", "life-cycle"),
    ("s3://bucket?endpoint=kv:9000", "http:// or https://"),
    ("s3://bucket?endpoint=http://u:p@kv", "write @ as %40"),
    ("s3://bucket?endpoint=http://u:p%40kv", "without credentials"),
    ("gs://u:p@bucket", "no user and password"),
    ("file://u:p@/x", "no user and password"),
    ("file://host/x", "absolute path"),
    ("file:x", "not a URL"),
    ("file:///x?shared=maybe", "option shared='maybe'"),
    ("memory://x", "unknown scheme 'memory'"),
]


@pytest.mark.parametrize(("url", "why"), BAD, ids=[it[0] for it in BAD])
def test_what_is_refused_and_why(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why.replace("(", r"\(")):
        parse_remote(url)


@pytest.mark.parametrize("value", [None, 5, b"redis://kv", ["redis://kv"]])
def test_only_text_is_a_url(value: object) -> None:
    with pytest.raises(ConfigError):
        parse_remote(value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://someone:s3cret@kv",
        "redis://someone:s3cret@kv?tll=1",
        "redis://someone:s3cret@kv:port",
        "redis://someone:s3cret/more@kv",
        "redis://someone:s3cret#more@kv",
        "redis://someone:s3cret@kv/db",
        "redi://someone:s3cret@kv",
        "s3://someone:s3cret@bucket/x",
        "s3://someone:s3cret@b*/x",
        "gs://someone:s3cret@bucket/x",
        "file://someone:s3cret@/x",
        "redis+unix://someone:s3cret@/run/x",
        "redis://someone:s3@cret@kv",
    ],
)
def test_no_secret_is_repeated(url: str) -> None:
    try:
        spec = parse_remote(url)
        texts = [repr(spec), str(spec), f"{spec}", spec.name]
    except ConfigError as error:
        texts = [str(error)]
    for text in texts:
        assert not any(word in text for word in ("someone", "s3cret", "cret"))


@given(
    st.text(max_size=60), st.sampled_from(["redis://", "s3://bucket/", "file:///", "rediss://u:p@h?", "az://c?", ""])
)
def test_any_text_is_understood_or_refused(text: str, start: str) -> None:
    for parse in (parse_remote, parse_disk):
        try:
            assert parse(start + text)
        except ConfigError:
            continue


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("/nvme/kv:500GiB", DiskSpec("/nvme/kv", 500 << 30)),
        ("/nvme/a:b/:1TiB?codec=zstd&admission=all", DiskSpec("/nvme/a:b", 1 << 40, "zstd", "all")),
        ("/nvme/kv:1048576", DiskSpec("/nvme/kv", 1 << 20)),
    ],
)
def test_a_disk(text: str, spec: DiskSpec) -> None:
    assert parse_disk(text) == spec
    assert parse_disk(spec) is spec
    assert parse_disk(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("/nvme/kv", "PATH:SIZE"),
        ("nvme/kv:5GiB", "PATH:SIZE"),
        (":5GiB", "PATH:SIZE"),
        ("/nvme/kv:", "not a size"),
        ("/nvme/kv:5", "least of 1MiB"),
        ("/nvme/kv:5XB", "not a size"),
        ("/nvme/kv:5GiB?ttl=1h", "'ttl'"),
        ("/nvme/kv:5GiB?codex=zstd", "nearest is 'codec'"),
    ],
)
def test_no_disk(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_disk(text)


def test_masks() -> None:
    assert mask("a redis://u:p@kv and s3://k:s@b/x?y=u@v") == "a redis://***@kv and s3://***@b/x?y=u@v"
    assert mask("no url, u@kv") == "no url, u@kv"


@pytest.mark.parametrize("parse", [parse_disk, parse_remote])
def test_specs_are_values(parse: Callable[[object], DiskSpec | RemoteSpec]) -> None:
    text = "/nvme/kv:1GiB" if parse is parse_disk else "redis://u:p@kv"
    assert hash(parse(text)) == hash(parse(text))
