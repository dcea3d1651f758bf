"""Two sides that do not fit together are told so, with the field and both values, before anything is shared."""

import dataclasses
import socket
from collections.abc import Callable

import msgspec
import pytest

import headwater
from headwater.config import NodeConfig
from headwater.errors import ProtocolError, RefusedError, UnavailableError
from headwater.node.client import Link, Session, fetch_status
from headwater.node.messages import (
    PROTOCOL,
    Hello,
    Match,
    Refused,
    Register,
    Registered,
    Reply,
    Status,
    StatusReply,
    Welcome,
    decode_reply,
    encode,
)
from headwater.types import HitRule, KVGroup, KVLayout, Namespace
from tests.node.conftest import Rig, closed
from tests.node.peers import LAYOUT, keys, namespace

OTHER_LAYOUTS = {
    "dtype": KVLayout(16, (KVGroup(16, 8192, (2,)),)),
    "block size": KVLayout(16, (KVGroup(8, 2048, (2,)),)),
    "chunk": KVLayout(32, (KVGroup(16, 4096, (2,)),)),
    "shards": KVLayout(16, (KVGroup(16, 4096, (2, 2)),)),
    "groups": KVLayout(16, (KVGroup(16, 4096, (2,)), KVGroup(16, 4096, (1,), HitRule.LAST))),
    "rule": KVLayout(16, (KVGroup(16, 4096, (2,), HitRule.LAST),)),
    "window": KVLayout(16, (KVGroup(16, 4096, (2,), HitRule.WINDOW, 32),)),
}


def ask(rig: Rig, *frames: bytes | bytearray) -> list[Reply]:
    """The replies to some frames, sent as they are."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as it:
        it.settimeout(5)
        it.connect(str(rig.server.listener.path))
        replies = []
        for frame in frames:
            it.sendall(frame)
            part = it.recv(1 << 16)
            if not part:
                raise EOFError("closed")
            replies.append(decode_reply(part[4:]))
        return replies


def refused(act: Callable[[], object]) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        act()
    error = caught.value
    assert error.field in str(error)
    assert error.expected in str(error)
    assert error.given in str(error)
    assert error.remedy
    return error


def test_another_protocol_is_refused_with_both_numbers_and_versions(rig: Rig) -> None:
    (reply,) = ask(rig, encode(Hello(PROTOCOL + 1, "9.9.9", "a", True)))
    assert isinstance(reply, Refused)
    assert reply.field == "protocol"
    assert f"{PROTOCOL} (headwater {headwater.__version__})" in reply.expected
    assert f"{PROTOCOL + 1} (headwater 9.9.9)" in reply.given


def test_a_client_that_was_refused_may_say_hello_again(rig: Rig) -> None:
    bad, good = ask(rig, encode(Hello(0, "0", "a", False)), encode(Hello(PROTOCOL, "x", "a", False)))
    assert isinstance(bad, Refused)
    assert isinstance(good, Welcome)


@pytest.mark.parametrize("instance", ["", "x" * 201])
def test_an_instance_has_a_name_of_bounded_length(rig: Rig, instance: str) -> None:
    assert refused(lambda: rig.link(instance)).field == "instance"


@pytest.mark.parametrize("field", [it.name for it in dataclasses.fields(Namespace) if it.name != "groups"])
def test_sessions_of_an_instance_agree_in_every_field_of_the_namespace(rig: Rig, field: str) -> None:
    rig.session("a")
    link = rig.link("a")
    changed = dataclasses.replace(namespace(), **{field: "other"})
    error = refused(lambda: Session(link, changed, LAYOUT))
    assert error.field == f"namespace.{field}"
    assert (error.expected, error.given) == (getattr(namespace(), field), "other")
    assert Session(link, namespace(), LAYOUT).match(keys(1)).chunks == 0, "the session stays usable"


@pytest.mark.parametrize("other", OTHER_LAYOUTS)
def test_sessions_of_an_instance_agree_in_the_layout(rig: Rig, other: str) -> None:
    rig.session("a")
    link = rig.link("a")
    layout = OTHER_LAYOUTS[other]
    error = refused(lambda: Session(link, namespace(layout), layout))
    assert error.field in ("layout.chunk_tokens", "layout.groups")
    assert error.expected == str(getattr(LAYOUT, error.field.removeprefix("layout.")))
    assert error.given == str(getattr(layout, error.field.removeprefix("layout.")))
    assert Session(link, namespace(), LAYOUT).match(keys(1)).chunks == 0, "the session stays usable"


def test_instances_with_other_layouts_or_namespaces_share_nothing(rig: Rig) -> None:
    first = rig.session("a")
    first.done(first.reserve(keys(3)).ticket)
    assert first.match(keys(3)).chunks == 3
    for index, layout in enumerate(OTHER_LAYOUTS.values()):
        assert rig.session(f"layout-{index}", layout=layout).match(keys(3)).chunks == 0
    for field in ("model", "kv_dtype", "layout", "parallel", "adapter", "tenant", "salt"):
        assert rig.session(f"other-{field}", namespace(**{field: "other"})).match(keys(3)).chunks == 0
    assert rig.session("b").match(keys(3)).chunks == 3


def test_groups_must_be_the_fingerprint_of_the_layout(rig: Rig) -> None:
    link = rig.link("a")
    error = refused(lambda: Session(link, namespace(groups="forged"), LAYOUT))
    assert (error.field, error.expected, error.given) == ("namespace.groups", LAYOUT.fingerprint(), "forged")
    other = OTHER_LAYOUTS["dtype"]
    assert refused(lambda: Session(link, namespace(other), LAYOUT)).given == other.fingerprint()
    Session(link, namespace(), LAYOUT)


def test_node_require_admits_only_its_values(config: NodeConfig) -> None:
    rig = Rig(dataclasses.replace(config, require={"kv_dtype": "fp8", "tenant": "blue"}))
    try:
        link = rig.link("a")
        error = refused(lambda: Session(link, namespace(kv_dtype="bf16", tenant="blue"), LAYOUT))
        assert (error.field, error.expected, error.given) == ("namespace.kv_dtype", "fp8", "bf16")
        error = refused(lambda: Session(link, namespace(kv_dtype="fp8"), LAYOUT))
        assert (error.field, error.expected, error.given) == ("namespace.tenant", "blue", "")
        assert Session(link, namespace(kv_dtype="fp8", tenant="blue"), LAYOUT).match(keys(1)).chunks == 0
        assert fetch_status(rig.address)["refused"] == 2
    finally:
        rig.close()


def test_a_chunk_that_no_slab_holds_is_refused_with_the_number(rig: Rig) -> None:
    big = KVLayout(16, (KVGroup(16, 4096, (17,)),))
    error = refused(lambda: rig.session("a", layout=big))
    assert str(64 << 10) in error.expected
    assert str(17 * 4096) in error.given
    assert "node.slab" in error.remedy
    assert rig.session("b", layout=KVLayout(16, (KVGroup(16, 4096, (16,)),))).reserve(keys(1)).covered == 1


UNSOUND = {
    "no groups": KVLayout(16, ()),
    "no blocks": KVLayout(16, (KVGroup(0, 4096, (2,)),)),
    "negative bytes": KVLayout(16, (KVGroup(16, -1, (2,)),)),
    "no chunk": KVLayout(0, (KVGroup(16, 4096, (2,)),)),
    "not a multiple": KVLayout(24, (KVGroup(16, 4096, (2,)),)),
    "no shards": KVLayout(16, (KVGroup(16, 4096, ()),)),
    "no layers": KVLayout(16, (KVGroup(16, 4096, (0,)),)),
    "unequal shards": KVLayout(16, (KVGroup(16, 4096, (2,)), KVGroup(16, 4096, (2, 2)))),
    "a window without its rule": KVLayout(16, (KVGroup(16, 4096, (2,), HitRule.ALL, 16),)),
    "too many groups": KVLayout(16, (KVGroup(16, 4096, (1,)),) * 65),
    "too many shards": KVLayout(16, (KVGroup(16, 1, (1,) * 4097),)),
    "huge": KVLayout(1 << 62, (KVGroup(1 << 62, 1 << 62, (1 << 62,)),)),
}


@pytest.mark.parametrize("layout", UNSOUND.values(), ids=UNSOUND)
def test_a_layout_that_cannot_be_is_refused(rig: Rig, layout: KVLayout) -> None:
    link = rig.link("a")
    groups = layout.fingerprint() if layout.groups else ""
    refused(lambda: Session(link, namespace(groups=groups), layout))
    Session(link, namespace(), LAYOUT)


def test_what_would_be_long_to_check_is_refused_first(rig: Rig) -> None:
    groups = KVLayout(16, (KVGroup(16, 4096, (1,)),) * 65)
    assert refused(lambda: rig.session("a", layout=groups)).field == "layout.groups"
    shards = KVLayout(16, (KVGroup(16, 1, (1,) * 4097),))
    assert refused(lambda: rig.session("a", layout=shards)).field == "layout.shards"


def test_names_of_a_namespace_are_bounded_because_they_stay_for_ever(rig: Rig) -> None:
    link = rig.link("a")
    for field in ("model", "salt"):
        error = refused(lambda field=field: Session(link, namespace(**{field: "x" * 1025}), LAYOUT))
        assert (error.field, error.given) == (f"namespace.{field}", "1025 characters")
    assert not rig.cache.spaces
    Session(link, namespace(model="x" * 1024), LAYOUT)


def test_a_refusal_is_short_whatever_was_given(rig: Rig) -> None:
    """A value of megabytes would make a reply that its own client must refuse to read."""
    rig.session("a")
    wide = KVLayout(16, tuple(KVGroup(16, 4096, (1,) * 16) for _ in range(64)))
    error = refused(lambda: rig.session("a", layout=wide))
    assert error.field == "layout.groups"
    assert len(str(error)) < 2100


def test_a_second_hello_ends_the_session(rig: Rig) -> None:
    link = rig.link("a")
    with pytest.raises(UnavailableError):
        link.call(Hello(PROTOCOL, "x", "b", False), Welcome)
    assert rig.link("c").call(Status(), StatusReply), "others are not concerned"


def test_nothing_is_answered_before_hello(rig: Rig) -> None:
    for request in (Status(), Register(namespace(), LAYOUT), Match(0, b"", False)):
        with pytest.raises((EOFError, ConnectionResetError)):
            ask(rig, encode(request))
    assert not rig.cache.spaces


def test_another_instances_handle_is_no_handle(rig: Rig) -> None:
    session = rig.session("a")
    assert session._space == 0
    for stranger in (rig.link("not-registered"), rig.session("b", namespace(tenant="b")).link):
        with pytest.raises(UnavailableError):
            stranger.call(Match(0, b"", False), Registered)
        assert closed_by_node(stranger)
    assert session.match(keys(1)).chunks == 0


def closed_by_node(link: Link) -> bool:
    return link._socket.fileno() < 0 or closed(link)


def test_an_unexpected_reply_closes_the_link(rig: Rig) -> None:
    link = rig.link("a")
    with pytest.raises(ProtocolError, match="StatusReply"):
        link.call(Status(), Registered)
    with pytest.raises(UnavailableError):
        link.call(Status(), StatusReply)


def test_status_holds_no_keys_salts_or_adapters(rig: Rig) -> None:
    session = rig.session("a", namespace(salt="S3CRET", adapter="ADAPT3R"))
    session.done(session.reserve(keys(2)).ticket)
    text = msgspec.json.encode(fetch_status(rig.address)).decode()
    assert "S3CRET" not in text
    assert "ADAPT3R" not in text
    assert keys(1)[0].hex() not in text
