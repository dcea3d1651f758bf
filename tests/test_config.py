"""Configuration: what each reader takes and refuses, who wins over whom, and that every refusal teaches."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.config import (
    FILE_VARIABLE,
    GIB,
    MIB,
    SETTINGS,
    EngineConfig,
    NodeConfig,
    child_environment,
    default_socket,
    default_value,
    embedded_node,
    engine_config,
    load_config,
    parse_duration,
    parse_size,
    public,
    runtime_dir,
    variable,
)
from headwater.errors import ConfigError
from headwater.places import parse_disk, parse_remote


def refusal(**call: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(**({"env": {}} | call))  # type: ignore[arg-type]
    return str(caught.value)


# ---------------------------------------------------------------- sizes and durations


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("5 gb", 5 * 10**9),
        ("5G", 5 * GIB),
        ("5GiB", 5 * GIB),
        ("5Gi", 5 * GIB),
        ("0.5g", GIB // 2),
        ("1.5KiB", 1536),
        ("2t", 2 << 40),
        ("3mb", 3_000_000),
        ("7k", 7 << 10),
        (" 4096 ", 4096),
        ("12 B", 12),
        ("0.1b", 0),
        (0, 0),
        (4096, 4096),
        (1 << 60, 1 << 60),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


NOT_SIZES = ["", " ", "-1", "+1", "NaN", "inf", "1e3", "1_000", "5X", "GiB", ".5g", "5.", "5g5", "5 g b", "0x10"]
NOT_SIZES_EITHER = ["٣GiB", "2t" * 9, "1048577t", 1 << 61, -1, True, 1.0, math.nan, math.inf, None, [], b"5G"]


@pytest.mark.parametrize("text", [*NOT_SIZES, *NOT_SIZES_EITHER])
def test_not_sizes(text: object) -> None:
    with pytest.raises(ConfigError, match="not a size; write"):
        parse_size(text)


@given(st.integers(0, 1 << 50), st.sampled_from(["", "b", "kib", "K", "MiB", "gi", "kb", "GB"]))
def test_whole_sizes_are_exact(number: int, unit: str) -> None:
    scale = {"": 1, "b": 1, "k": 1024, "m": 1024**2, "g": 1024**3}[unit[:1].lower()]
    if unit.lower() in ("kb", "gb"):
        scale = {"k": 1000, "g": 1000**3}[unit[0].lower()]
    if number * scale <= 1 << 60:
        assert parse_size(f"{number}{unit}") == number * scale


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 30), ("30s", 30), ("500ms", 0.5), ("2m", 120), ("2 min", 120), ("1h", 3600), (0.25, 0.25)],
)
def test_durations(text: object, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "0", 0, "-1", -1, "NaN", math.nan, math.inf, "inf", "1e3", "5d", "25h", True, None]
)
def test_not_durations(text: object) -> None:
    with pytest.raises(ConfigError, match="not a duration"):
        parse_duration(text)


# ---------------------------------------------------------------- precedence and origin


def test_defaults() -> None:
    effective = load_config(env={})
    assert set(effective.origin) == set(SETTINGS)
    assert set(effective.origin.values()) == {"default"}
    node, engine = effective.config.node, effective.config.engine
    assert (node.host_memory, node.eviction, node.prefault, node.require) == (4 * GIB, "learned", True, {})
    assert (node.disk, node.remotes, node.quotas, node.keys) == ("", (), {}, "")
    assert (engine.node, engine.chunk_tokens, engine.save_decode) == ("", 256, True)
    for name in SETTINGS:
        if name != "node.socket":
            assert effective.value(name) == default_value(name), name


def test_each_source_wins_over_the_one_below(tmp_path: Path) -> None:
    file = tmp_path / "headwater.toml"
    file.write_text('[node]\nhost_memory = "1GiB"\nslab = "1MiB"\ndrain_s = 3\n[log]\nlevel = "debug"\n')
    env = {variable("node.host_memory"): "2GiB", variable("node.slab"): "2MiB", "PATH": "/bin"}
    effective = load_config(file, env, {"node.host_memory": "3GiB", "node.eviction": None})
    node = effective.config.node
    assert (node.host_memory, node.slab, node.drain_s, node.eviction) == (3 * GIB, 2 * MIB, 3.0, "learned")
    assert effective.config.log.level == "debug"
    assert effective.origin["node.host_memory"] == "flag"
    assert effective.origin["node.slab"] == "env HEADWATER_NODE_SLAB"
    assert effective.origin["node.drain_s"] == f"file {file}"
    assert effective.origin["node.eviction"] == "default"


def test_the_file_comes_from_the_argument_else_from_the_environment(tmp_path: Path) -> None:
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text("[engine]\nchunk_tokens = 128\n")
    second.write_text("[engine]\nchunk_tokens = 512\n")
    env = {FILE_VARIABLE: str(second)}
    assert load_config(env=env).config.engine.chunk_tokens == 512
    assert load_config(first, env).config.engine.chunk_tokens == 128


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_can_come_from_file_variable_and_flag(name: str, tmp_path: Path) -> None:
    values = {
        "socket": "unix:/a/b.sock",
        "node": "unix:/a/b.sock",
        "metrics": "off",
        "backing": "/dev/shm",
        "eviction": "s3fifo",
        "level": "error",
        "require": "kv_dtype=float32",
        "slab": "2MiB",
        "host_memory": "8MiB",
        "quotas": "blue=8MiB,=1GiB",
        "disk": "/nvme/kv:5GiB?codec=int8",
        "remotes": "redis://kv:6379/0 s3://bucket/prefix",
        "keys": "/etc/headwater/keys",
        "transfer_bytes": "8MiB",
        "lossy": "int8",
        "directory": "rediss://user:secret@kv:6379/0",
        "listen": "0.0.0.0:7420",
        "advertise": "[fd00::5]:7420",
        "token_file": "/etc/headwater/token",
        "tls_cert": "",
        "tls_key": "",
        "tls_ca": "",
        "labels": "zone=a,switch=s1",
        "cluster_quotas": "blue=8MiB",
    }
    section, key = name.split(".")
    text = values.get(key, {"bool": str(not default_value(name)), "str": "word"}.get(str(SETTINGS[name].type), "7"))
    file = tmp_path / "c.toml"
    file.write_text(f"[{section}]\n{key} = {json.dumps(text)}\n")
    found = [
        load_config(file, {}).value(name),
        load_config(env={variable(name): text}).value(name),
        load_config(env={}, overrides={name: text}).value(name),
    ]
    assert found[0] == found[1] == found[2]
    assert found[0] != default_value(name) or key.startswith("tls_"), "those three come together"


def test_every_setting_says_what_it_is_for() -> None:
    for name, it in SETTINGS.items():
        assert len(it.metadata["help"]) > 10, name


# ---------------------------------------------------------------- refusals


def test_unknown_names_are_refused_with_the_nearest_known_one(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[node]\nhost_mem = 1\n")
    assert refusal(file=file) == f"unknown key node.host_mem (file {file}); the nearest known key is node.host_memory"
    file.write_text("[nodes]\nhost_memory = 1\n")
    assert "unknown section [nodes]" in refusal(file=file)
    assert "[node]" in refusal(file=file)
    file.write_text("node = 3\n")
    assert "not a section; write [node]" in refusal(file=file)
    assert refusal(env={"HEADWATER_NODE_HOSTMEMORY": "1GiB"}) == (
        "unknown environment variable HEADWATER_NODE_HOSTMEMORY; the nearest known one is HEADWATER_NODE_HOST_MEMORY"
    )
    assert "node.host_memory" in refusal(overrides={"node.hostmemory": "1GiB"})


def test_a_bad_value_names_field_value_origin_and_remedy(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[node]\nhost_memory = nan\n")
    assert refusal(file=file).startswith(f"node.host_memory = nan (file {file}): not a size; write")
    assert refusal(env={"HEADWATER_NODE_HOST_MEMORY": ""}).startswith(
        "node.host_memory = '' (env HEADWATER_NODE_HOST_MEMORY): not a size; write"
    )
    assert "(flag): 32 bytes is below the least of 1MiB; is a unit missing" in refusal(
        overrides={"node.host_memory": "32"}
    )


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("node.host_memory", 0, "below the least"),
        ("node.slab", "5000", "not a multiple of 4096"),
        ("node.slab", "8GiB", "use 0 to have it chosen"),
        ("node.eviction", "random", "not one of learned, lru, s3fifo"),
        ("node.load_lease_s", 0, "not a duration"),
        ("node.max_sessions", 0, "from 1 to 65536"),
        ("node.max_sessions", "1.5", "not a whole number"),
        ("node.prefault", "maybe", "neither true nor false"),
        ("node.prefault", 1, "neither true nor false"),
        ("node.backing", "shm", "neither memfd nor the absolute path"),
        ("node.socket", "/run/x.sock", "write unix:"),
        ("node.socket", "unix:x.sock", "write unix:"),
        ("node.socket", "tcp:127.0.0.1:1", "write unix:"),
        ("node.socket", "unix:/" + "x" * 107, "108 bytes, the kernel takes 107"),
        ("node.socket", "unix:/a\0b", "not text"),
        ("node.metrics", "7480", "HOST:PORT"),
        ("node.metrics", "127.0.0.1:", "HOST:PORT"),
        ("node.metrics", "127.0.0.1:70000", "HOST:PORT"),
        ("node.metrics", "0.0.0.0:7480", "not a loopback address"),
        ("node.metrics", "[::]:7480", "not a loopback address"),
        ("node.metrics", "10.0.0.1:7480", "not a loopback address"),
        ("node.metrics", "example.org:7480", "not a loopback address"),
        ("node.metrics", "localhost.example.org:7480", "not a loopback address"),
        ("node.require", "kv_type=float32", "no field 'kv_type'; the nearest is 'kv_dtype'"),
        ("node.require", "kv_dtype", "'kv_dtype' has no value"),
        ("node.require", {"kv_dtype": 1}, "not text"),
        ("node.require", 3, "neither a table"),
        ("node.quotas", "blue", "'blue' has no value; write tenant=size"),
        ("node.quotas", "blue=5XB", "not a size"),
        ("node.quotas", "blue=1", "is a unit missing"),
        ("node.quotas", ["blue=1GiB", "blue=2GiB"], "'blue' is there twice"),
        ("node.quotas", {"blue": -1}, "not a size"),
        ("node.quotas", 7, "neither a table nor pairs"),
        ("node.quotas", "blue=3GiB,red=2GiB", "more than node.host_memory = 4294967296; lower a quota"),
        ("node.disk", "/a:", "not a size"),
        ("node.disk", "/a", "not PATH:SIZE"),
        ("node.disk", ":5GB", "with an absolute path"),
        ("node.disk", "5GB", "with an absolute path"),
        ("node.disk", "kv:5GB", "with an absolute path"),
        ("node.disk", "./kv:5GB", "with an absolute path"),
        ("node.disk", "~/kv:5GB", "with an absolute path"),
        ("node.disk", "/a:-5GB", "not a size"),
        ("node.disk", "/a:5", "is a unit missing"),
        ("node.disk", "/a:5GB?compress=zstd", "no option 'compress'; the nearest is"),
        ("node.disk", "/a:5GB?codec", "not option=value"),
        ("node.disk", "/a:5GB?codec=none&codec=zstd", "given twice"),
        ("node.disk", "/a:5GB?admission=some", "not one of"),
        ("node.disk", ["/a:5GB"], "not text"),
        ("node.disk_reserve", "some", "not a size"),
        ("node.disk_reserve", -1, "not a size"),
        ("node.disk_threads", 0, "from 1 to 64"),
        ("node.disk_threads", "two", "not a whole number"),
        ("node.remotes", "host:6379", "not a URL"),
        ("node.remotes", "http://host", "unknown scheme 'http'"),
        ("node.remotes", "redsi://host", "the nearest known one is 'redis'"),
        ("node.remotes", "redis://", "the host is missing"),
        ("node.remotes", "redis://host:port", "node.remotes = 'redis://...'"),
        ("node.remotes", "redis://host:70000", "host and port cannot be read"),
        ("node.remotes", "redis://host/first", "not the number of a database"),
        ("node.remotes", "redis://host?ttl=-1s", "option ttl='-1s': not a duration"),
        ("node.remotes", "redis://host?ttl=0", "not a duration"),
        ("node.remotes", "redis://host?tll=5m", "no option 'tll'; the nearest is 'ttl'"),
        ("node.remotes", "s3://bucket?ttl=5m", "no option 'ttl'"),
        ("node.remotes", "s3:///prefix", "no name of a bucket"),
        ("node.remotes", "file://shared/nfs", "not an absolute path"),
        ("node.remotes", "redis://a:1 redis://b:port", "number 2: "),
        ("node.remotes", ["redis://a:1", 3], "number 2: not text"),
        ("node.remotes", ["redis://a", "redis://user:secret@a:6379"], "redis://a:6379 is there twice"),
        ("node.remotes", {"first": "redis://a"}, "neither a list of URLs"),
        ("node.keys", "keys", "not an absolute path"),
        ("node.transfer_bytes", "5", "is a unit missing"),
        ("node.name", "a b", "not a name of up to 64"),
        ("node.cluster", "", "a cluster needs a name"),
        ("node.directory", "s3://bucket", "kept by Redis or Valkey"),
        ("node.directory", "redis://host:port", "node.directory = 'redis://...'"),
        ("node.listen", "7420", "not HOST:PORT"),
        ("node.listen", "host:70000", "not HOST:PORT"),
        ("node.listen", "a b:1", "not HOST:PORT"),
        ("node.advertise", "host:0", "port 0 is no port"),
        ("node.token_file", "token", "not an absolute path"),
        ("node.tls_cert", "/cert", "mutual TLS needs node.tls_cert, node.tls_key and node.tls_ca"),
        ("node.labels", "zone", "'zone' has no value"),
        ("node.labels", "zone=a b", "not up to 16 labels"),
        ("node.cluster_quotas", "blue=1", "is a unit missing"),
        ("node.replicas", 0, "from 1 to 16"),
        ("engine.disk", "5GB", "with an absolute path"),
        ("engine.remotes", "kv:6379", "not a URL"),
        ("engine.lossy", "fp4", "not one of none, int8"),
        ("engine.chunk_tokens", 0, "from 1 to"),
        ("engine.chunk_tokens", True, "not a whole number"),
        ("engine.tenant", 5, "not text"),
        ("engine.node", "unix:", "write unix:"),
        ("log.level", "loud", "debug, info, warning, error"),
    ],
)
def test_bad_values(name: str, value: object, says: str) -> None:
    message = refusal(overrides={name: value})
    assert says in message
    assert name in message


def test_the_longest_socket_path_is_taken() -> None:
    assert NodeConfig(socket="unix:/" + "x" * 106).socket.endswith("x")


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    assert "No such file" in refusal(file=tmp_path / "none.toml")
    assert FILE_VARIABLE in refusal(env={FILE_VARIABLE: str(tmp_path / "none.toml")})
    file = tmp_path / "c.toml"
    file.write_bytes(b"[node\n")
    assert str(file) in refusal(file=file)
    file.write_bytes(b"\xff\xfe")
    assert str(file) in refusal(file=file)


def test_configurations_built_in_code_are_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"node\.metrics"):
        NodeConfig(metrics="0.0.0.0:7480")
    with pytest.raises(ConfigError, match=re.escape("engine.copy_threads = 0 (in code)")):
        EngineConfig(copy_threads=0)


def test_variables_of_kubernetes_services_are_not_ours() -> None:
    env = {
        "HEADWATER_SERVICE_HOST": "10.0.0.1",
        "HEADWATER_NODE_SERVICE_PORT": "80",
        "HEADWATER_NODE_SERVICE_PORT_HTTP": "80",
        "HEADWATER_PORT": "tcp://10.0.0.1:80",
        "HEADWATER_NODE_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    assert set(load_config(env=env).origin.values()) == {"default"}
    for name in SETTINGS:
        assert load_config(env={variable(name) + "_SERVICE_HOST": "x"}), name
        assert not re.search("_(PORT|SERVICE_HOST|SERVICE_PORT)", variable(name)), "Kubernetes may set it"
    assert "HEADWATER_NODE_SUPPORT" in refusal(env={"HEADWATER_NODE_SUPPORT": "1"})
    assert load_config(env={"HEADWATER_TEST_SEED": "7"}), "the test suite's own"


# ---------------------------------------------------------------- places and passwords

SECRET = "hunter2"
READABLE = [
    f"redis://user:{SECRET}@kv:6379/0",
    f"redis://:{SECRET}@kv",
    f"valkeys://{SECRET}@kv:6379?ca=/etc/ca.pem",
    f"redis://user:a@{SECRET}@kv:6379",
    f"redis://user:{SECRET}%2F%40@[::1]:6379",
    f"s3://key:{SECRET}@bucket/prefix?endpoint=http://10.0.0.5:9000",
]
UNREADABLE = [
    f"redsi://user:{SECRET}@kv:6379",
    f"redis://user:{SECRET}@kv:port",
    f"redis://user:{SECRET}@",
    f"redis://user:{SECRET}/x@kv:6379",
    f"redis://user:x/{SECRET}@kv:6379",
    f"redis://us/er:{SECRET}@kv:6379",
    f"redis://user:{SECRET}?x@kv:6379",
    f"redis://user:x?{SECRET}@kv:6379",
    f"redis://user:{SECRET}#x@kv:6379",
    f"redis://user:x#{SECRET}@kv:6379",
    f"redis://user:[{SECRET}@kv:6379",
    f"redis://user:{SECRET}@kv:6379?ttl=soon",
    f"redis://kv:6379?password={SECRET}",
    f"redis://kv:6379?{SECRET}",
    f"user:{SECRET}@kv:6379",
    f"user:{SECRET}@redis://kv:6379",
    f"s3://key:x/{SECRET}@bucket/prefix",
    f"s3://key:{SECRET}@bucket/prefix?secret={SECRET}",
    f"gs://key:{SECRET}@bucket",
    f"redis:/user:{SECRET}@kv:6379",
]


@pytest.mark.parametrize("url", READABLE)
def test_passwords_of_good_urls_are_kept_but_not_shown(url: str) -> None:
    effective = load_config(env={variable("node.remotes"): url})
    assert effective.config.node.remotes == (url,)
    assert SECRET not in repr(effective)
    shown = public("node.remotes", effective.value("node.remotes"))
    assert isinstance(shown, list)
    assert SECRET not in shown[0]
    assert "***@" in shown[0]
    assert parse_remote(url).password or parse_remote(url).user
    assert "number 2" in (said := refusal(overrides={"node.remotes": [url, "kv"]}))
    assert SECRET not in said


@pytest.mark.parametrize("url", UNREADABLE)
def test_passwords_of_bad_urls_are_not_shown_either(url: str) -> None:
    for value in (url, [url], f"redis://other {url}"):
        message = refusal(overrides={"node.remotes": value})
        assert SECRET not in message
        assert message.startswith("node.remotes = ")
    assert SECRET not in refusal(overrides={"node.remotes": {"url": url}})


SPECIAL = st.text(alphabet="@:/?#[]%&= .,;'\"\\2é", max_size=4)


@given(
    st.sampled_from(["redis", "valkeys", "redis+unix", "s3", "gs", "az", "file", "http", "re dis", ""]),
    st.lists(SPECIAL, min_size=4, max_size=4),
    st.sampled_from(["kv", "kv:6379", "kv:port", "[::1]", "bucket/prefix", "", "kv?ttl=1h", "kv?ttl=x#y"]),
)
def test_no_password_is_shown_however_it_is_written(scheme: str, parts: list[str], rest: str) -> None:
    before, user, password, after = parts
    url = f"{scheme}://{before}{user}:{password}{SECRET}{after}@{rest}"
    for value in ([url], url):
        if isinstance(value, str) and (len(value.split()) > 2 or "://" in user + password + after):
            continue  # it cannot be told any more what belongs together
        try:
            effective = load_config(env={}, overrides={"node.remotes": value})
        except ConfigError as error:
            assert SECRET not in str(error)
        else:
            assert SECRET not in repr(effective)
            for it in effective.config.node.remotes:
                read = parse_remote(it)
                kept = [read.user, read.password] if SECRET in read.user + read.password else []
                if kept:  # what is no part of the credentials is a path, as it was meant
                    assert SECRET not in str(public("node.remotes", [it])) + str(read) + repr(read) + read.name


def test_a_password_with_a_space_is_not_shown(tmp_path: Path) -> None:
    assert SECRET not in refusal(env={variable("node.remotes"): f"redis://user:a {SECRET}@kv:6379"})
    file = tmp_path / "c.toml"
    file.write_text(f'remotes = "redis://user:{SECRET}@kv"\n')
    assert SECRET not in refusal(file=file)
    file.write_text(f'node = "redis://user:{SECRET}@kv"\n')
    assert SECRET not in refusal(file=file)


@pytest.mark.parametrize(
    "value",
    [
        "redis://a s3://bucket/p",
        "  redis://a\n\ts3://bucket/p ",
        ["redis://a", " s3://bucket/p"],
        ("redis://a", "s3://bucket/p"),
    ],
)
def test_remotes_keep_their_order(value: object) -> None:
    assert load_config(env={}, overrides={"node.remotes": value}).config.node.remotes == ("redis://a", "s3://bucket/p")


def test_remotes_of_a_file_are_a_list(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[node]\nremotes = ["redis://a:1", "redis://a:2"]\nquotas = {blue = "1GiB", "" = 1048576}\n')
    node = load_config(file, {}).config.node
    assert node.remotes == ("redis://a:1", "redis://a:2")
    assert node.quotas == {"blue": GIB, "": MIB}
    assert load_config(file, {variable("node.remotes"): ""}).config.node.remotes == ()


@pytest.mark.parametrize(("value", "reserve"), [("auto", None), ("AUTO ", None), ("0", 0), ("5GiB", 5 * GIB), (7, 7)])
def test_the_reserve_may_be_nothing_or_left_to_the_node(value: object, reserve: int | None) -> None:
    assert load_config(env={}, overrides={"node.disk_reserve": value}).config.node.disk_reserve == reserve
    assert NodeConfig(disk_reserve=reserve).disk_reserve == reserve


def test_a_disk_path_may_have_colons() -> None:
    disk = parse_disk(NodeConfig(disk="/a:b/c:5GB?codec=int8").disk)
    assert (disk.path, disk.size_bytes, disk.codec) == ("/a:b/c", 5 * 10**9, "int8")


# ---------------------------------------------------------------- what values mean


@pytest.mark.parametrize("address", ["127.0.0.1:7480", "127.9.9.9:0", "localhost:7480", "[::1]:7480"])
def test_loopback_addresses(address: str) -> None:
    host, port = NodeConfig(metrics=address).metrics_address or ("", -1)
    assert (host, port) == (address.rpartition(":")[0].strip("[]"), int(address.rpartition(":")[2]))


def test_metrics_can_be_off() -> None:
    assert NodeConfig(metrics="OFF").metrics_address is None
    assert load_config(env={}, overrides={"node.metrics": "off"}).config.node.metrics_address is None


@pytest.mark.parametrize(
    ("memory", "slab", "chosen"),
    [
        (4 * GIB, 0, 256 * MIB),
        (GIB, 0, 128 * MIB),
        (64 * MIB, 0, 16 * MIB),
        (2 * MIB, 0, 2 * MIB),
        (2 * MIB + 5, 0, 2 * MIB),
        (GIB, 8 * MIB, 8 * MIB),
    ],
)
def test_slab(memory: int, slab: int, chosen: int) -> None:
    assert NodeConfig(host_memory=memory, slab=slab).slab_bytes == chosen


@pytest.mark.parametrize(
    ("size", "slab", "chosen"),
    [
        ("1MiB", 0, 128 << 10),
        ("1GiB", 0, 128 * MIB),
        ("1500MiB", 0, 128 * MIB),
        ("2GiB", 0, 256 * MIB),
        ("5TiB", 0, 256 * MIB),
        ("5TiB", MIB, 256 * MIB),
        ("5TiB", GIB, GIB),
    ],
)
def test_the_slab_of_a_disk_follows_its_size_and_not_the_memory(size: str, slab: int, chosen: int) -> None:
    for memory in (GIB, 64 * GIB):
        assert NodeConfig(host_memory=memory, slab=slab, disk=f"/kv:{size}").disk_slab_bytes == chosen


@given(st.integers(MIB, 1 << 42))
def test_a_chosen_slab_fits_and_is_whole_pages(memory: int) -> None:
    slab = NodeConfig(host_memory=memory).slab_bytes
    assert 0 < slab <= memory
    assert slab % 4096 == 0


@pytest.mark.parametrize(
    "value",
    ["kv_dtype=float32, tenant=a=b", ["kv_dtype=float32", "tenant=a=b"], {"kv_dtype": "float32", "tenant": "a=b"}],
)
def test_requirements(value: object) -> None:
    config = load_config(env={}, overrides={"node.require": value}).config
    assert config.node.require == {"kv_dtype": "float32", "tenant": "a=b"}


# ---------------------------------------------------------------- engines


def test_engine_settings_from_the_extra_config() -> None:
    extra = {"node": "unix:/run/n.sock", "chunk_tokens": 128, "save": False, "load_s": "2s", "tenant": None}
    config = engine_config(extra, env={"HEADWATER_ENGINE_TENANT": "blue", "HEADWATER_ENGINE_CHUNK_TOKENS": "64"})
    assert (config.node, config.chunk_tokens, config.save, config.load_s) == ("unix:/run/n.sock", 128, False, 2.0)
    assert config.tenant == "blue"
    assert engine_config({}, env={}) == EngineConfig()


def test_the_node_inside_an_engine_has_the_engines_tiers() -> None:
    extra = {"host_memory": "1GiB", "disk": "/a:5GiB", "remotes": "redis://a file:///b", "keys": "/k"}
    node = embedded_node(engine_config(extra, env={}), "unix:/run/e.sock")
    assert (node.socket, node.host_memory, node.metrics, node.keys) == ("unix:/run/e.sock", GIB, "off", "/k")
    assert (node.disk, node.remotes) == ("/a:5GiB", ("redis://a", "file:///b"))
    assert engine_config(extra | {"remotes": ["redis://a", "file:///b"]}, env={}).remotes == node.remotes


@pytest.mark.parametrize("extra", [{"disk": "/a:5GiB"}, {"remotes": ["redis://a"]}, {"keys": "/k"}])
def test_tiers_of_a_node_elsewhere_are_not_the_engines_to_set(extra: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="inside the engine; give them to that node"):
        engine_config({"node": "unix:/run/n.sock"} | extra, env={})


def test_an_unknown_engine_key_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        engine_config({"chunk_size": 1}, env={})
    assert str(caught.value) == (
        "unknown key 'chunk_size' (kv_connector_extra_config); the nearest known key is 'chunk_tokens'"
    )
    with pytest.raises(ConfigError, match=re.escape("engine.save = 'si' (kv_connector_extra_config)")):
        engine_config({"save": "si"}, env={})


def test_no_engine_key_differs_from_the_tree() -> None:
    for it in fields(EngineConfig):
        assert engine_config({it.name: default_value(f"engine.{it.name}")}, env={}) == EngineConfig()


# ---------------------------------------------------------------- places and children


def test_runtime_dir(tmp_path: Path) -> None:
    assert runtime_dir({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "headwater"
    fallback = Path(f"/tmp/headwater-{os.getuid()}")
    for base in ("", "relative", str(tmp_path / "absent")):
        assert runtime_dir({"XDG_RUNTIME_DIR": base}) == fallback
    assert runtime_dir({}) == fallback
    assert default_socket({"XDG_RUNTIME_DIR": str(tmp_path)}) == f"unix:{tmp_path}/headwater/node.sock"
    assert load_config(env={"XDG_RUNTIME_DIR": str(tmp_path)}).config.node.socket.startswith(f"unix:{tmp_path}/")


def test_children_get_our_environment_without_our_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_NODE_SLAB", "1MiB")
    monkeypatch.setenv("UNRELATED", "kept")
    monkeypatch.setenv("UNWANTED", "dropped")
    env = child_environment({"HEADWATER_LOG_LEVEL": "debug", "UNWANTED": None, "NEVER_THERE": None})
    assert "HEADWATER_NODE_SLAB" not in env
    assert "UNWANTED" not in env
    assert (env["UNRELATED"], env["HEADWATER_LOG_LEVEL"]) == ("kept", "debug")
    assert os.environ["UNWANTED"] == "dropped"
    assert load_config().origin["node.slab"] == "env HEADWATER_NODE_SLAB"
