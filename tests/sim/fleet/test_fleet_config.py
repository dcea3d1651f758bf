"""A fleet's file: what is read, and that each refusal names the place, the reason and the remedy."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from headwater.enginetimes import EngineTimes
from headwater.errors import ConfigError
from headwater.fleet import Role
from headwater.fleetfile.tables import read_yaml
from headwater.sim.fleet.config import KNOWN_TIMES, PolicyConfig, parse_fleet, read_times

GROUP = {"blocks": 100}
TIER = {"size": "64GiB", "bytes_s": "20GB/s"}


def test_everything_is_read() -> None:
    config = parse_fleet(
        yaml.safe_load(
            """
            model: llama
            kv_bytes_per_token: 128KiB
            instances:
              - {count: 2, role: prefill, blocks: 16384, block_tokens: 16, instances_per_host: 2, startup_s: 1m}
              - count: 3
                role: decode
                blocks: 100
                times: {prefill_fixed_s: 0.01, prefill_token_s: 1.0e-5, decode_fixed_s: 1}
            tiers:
              host: {size: 64GiB, bytes_s: 20GB/s, latency_s: 100us}
              remote: {size: 1GB, bytes_s: 10GB, latency_s: 2ms, keeping: lru, total_bytes_s: 40GB}
            link: {bytes_s: 5GB/s, latency_s: 1ms}
            policy: {name: headwater, knobs: {sticky_s: 0.1}}
            admission: {enabled: true, long_share: 0.5}
            slo: {ttft_s: 3s, tpot_s: 50ms}
            conductors: 2
            deaths: [{instance: 4, at_s: 10, back_s: 20}]
            signals: {event_lag_s: 10ms, load_lag_s: 5ms, events: missing}
            load: 2
            """
        )
    )
    first, second = config.instances
    assert (first.role, first.startup_s, first.capacity_tokens) == (Role.PREFILL, 60.0, 16384 * 16)
    assert first.times == KNOWN_TIMES["mocker"](16384 * 16)
    assert second.times == EngineTimes(0.01, 1e-5, decode_fixed_s=1.0)
    assert config.kv_bytes_per_token == 131072
    assert config.tiers.host is not None
    assert (config.tiers.host.size, config.tiers.host.bytes_s) == (2**36, 20e9)
    assert config.tiers.host.latency_s == pytest.approx(1e-4)
    assert config.tiers.disk is None
    assert config.link is not None
    assert config.link.bytes_s == 5e9
    assert config.policy == PolicyConfig("headwater", {"sticky_s": 0.1})
    assert (config.conductors.count, config.load, config.instance_count) == (2, 2.0, 5)
    assert config.plain()["tiers"]["remote"]["total_bytes_s"] == 40e9


def test_short_forms_and_what_is_left_out() -> None:
    config = parse_fleet(
        {
            "instances": [GROUP],
            "kv_bytes_per_token": 1024,
            "policy": "session",
            "admission": True,
            "tiers": {"host": {**TIER, "size": 0}, "disk": None},
        }
    )
    assert config.policy.name == "session"
    assert config.admission.enabled
    assert config.tiers.host is None
    assert not parse_fleet({"instances": [GROUP]}).admission.enabled


def test_times_from_a_file_beside_the_fleet(tmp_path: Path) -> None:
    times = {"prefill_fixed_s": 0.02, "prefill_token_s": 2e-5, "decode_fixed_s": 0.01}
    (tmp_path / "engine.yaml").write_text(yaml.safe_dump({"times": times}))
    (tmp_path / "fleet.yaml").write_text(yaml.safe_dump({"instances": [{"blocks": 5, "times": "engine.yaml"}]}))
    read = parse_fleet(read_yaml(tmp_path / "fleet.yaml"), base=tmp_path)
    assert read.instances[0].times == EngineTimes(0.02, 2e-5, decode_fixed_s=0.01)


def test_the_model_says_what_a_token_takes() -> None:
    tree = {"instances": [GROUP], "model": "llama", "tiers": {"host": TIER}}
    assert parse_fleet(tree, kv_bytes={"llama": 777}.__getitem__).kv_bytes_per_token == 777
    with pytest.raises(ConfigError, match=r"^kv_bytes_per_token: "):
        parse_fleet(tree)


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({}, "instances: is missing"),
        ({"instances": []}, "instances: there is no group"),
        ({"instances": 3}, "instances: 3 is not a list"),
        ({"instances": [GROUP], "instancs": 1}, "instancs: is not a setting here; the nearest is instances"),
        ({"instances": [{}]}, "instances[0].blocks: is missing"),
        ({"instances": [GROUP, {"blocks": 0}]}, "instances[1].blocks: 0 is not a whole number from 1"),
        ({"instances": [{**GROUP, "tims": 1}]}, "instances[0].tims: is not a setting here; the nearest is times"),
        ({"instances": [{**GROUP, "role": "serve"}]}, "instances[0].role: 'serve' is not one of both"),
        ({"instances": [{**GROUP, "times": "moker"}]}, "instances[0].times: 'moker' is neither"),
        ({"instances": [{**GROUP, "times": "no.yaml"}]}, "instances[0].times: no.yaml: No such file"),
        ({"instances": [{**GROUP, "times": {"prefil_s": 1}}]}, "instances[0].times.prefil_s: is not a step time"),
        ({"instances": [{**GROUP, "role": "prefill"}]}, "instances: none with role decode"),
        ({"instances": [{**GROUP, "count": 9000}] * 2}, "instances: 18000 in all"),
        ({"instances": [GROUP], "tiers": {"host": {"size": "1GiB"}}}, "tiers.host.bytes_s: is missing"),
        (
            {"instances": [GROUP], "tiers": {"host": {**TIER, "size": "64 parrots"}}},
            "tiers.host.size: '64 parrots' is not",
        ),
        ({"instances": [GROUP], "tiers": {"host": {**TIER, "bytes_s": 0}}}, "tiers.host.bytes_s: nothing would ever"),
        ({"instances": [GROUP], "tiers": {"host": TIER}}, "kv_bytes_per_token: is not given, and tiers.host needs it"),
        ({"instances": [GROUP], "tiers": {"hots": TIER}}, "tiers.hots: is not a setting here; the nearest is host"),
        ({"instances": [GROUP], "link": {"bytes_s": 1}}, "kv_bytes_per_token: is not given, and link needs it"),
        ({"instances": [GROUP], "deaths": [{"instance": 1, "at_s": 1}]}, "deaths[0].instance: 1 does not exist"),
        ({"instances": [GROUP], "deaths": [{"instance": 0, "at_s": 2, "back_s": 1}]}, "deaths[0].back_s: 1 is before"),
        ({"instances": [GROUP], "deaths": [{"instance": 0, "at_s": "soon"}]}, "deaths[0].at_s: 'soon' is not a time"),
        ({"instances": [GROUP], "policy": 3}, "policy: 3 is not a table"),
        ({"instances": [GROUP], "conductors": 0}, "conductors.count: 0 is not a whole number"),
        ({"instances": [GROUP], "load": 0}, "load: 0 is not a number from"),
        ({"instances": [GROUP], "slo": {"ttft_s": -1}}, "slo.ttft_s: -1 is not a time"),
        ({"instances": [GROUP], "signals": {"events": "late"}}, "signals.events: 'late' is not one of live, missing"),
        (
            {"instances": [{**GROUP, "role": "prefill"}, {**GROUP, "role": "decode"}]},
            "link: is not given, and KV goes from prefill to decode",
        ),
    ],
)
def test_refusals_name_place_reason_and_remedy(tree: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_fleet(tree)
    assert str(refusal.value).startswith(said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prefill_token_s": 0}, "prefill_token_s: "),
        ({"prefill_fixed_s": None}, "prefill_fixed_s: "),
        ({"step_tokens": 200}, "step_tokens: must be above requests_max"),
        ({"step_tokens": 0}, "step_tokens: 0 is not a whole number"),
        ({"decode_fixed_s": 0}, "decode_fixed_s: a decode step takes no time"),
        ({"decode_kv_s": "fast"}, "decode_kv_s: 'fast' is not a number"),
        ({"decode_kv_s": float("nan")}, "decode_kv_s: nan is not a number"),
    ],
)
def test_step_times_that_cannot_be(change: dict[str, Any], said: str) -> None:
    times = {"prefill_fixed_s": 0.01, "prefill_token_s": 1e-5, "decode_fixed_s": 0.01}
    with pytest.raises(ConfigError) as refusal:
        read_times(times | change, 1000)
    assert str(refusal.value).startswith(said)


LISTS = [f"&{name} [{', '.join(9 * [f'*{before}'])}]" for before, name in pairwise("abcdefghi")]
BOMB = f"instances: [{{blocks: 9}}]\nslo: [&a [1, 1, 1, 1, 1, 1, 1, 1, 1], {', '.join(LISTS)}]"
"""9 ** 9 numbers, if anybody writes them out."""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- 1", "no table"),
        ("a: [", "not YAML"),
        ("a: " + 5000 * "[" + 5000 * "]", "nested too deeply"),
        (BOMB, "an alias"),
        ("seed: 1\ninstances: []\nseed: 2", "line 3: seed is there twice"),
        (None, "No such file"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "fleet.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=said) as refusal:
        parse_fleet(read_yaml(path))
    assert len(str(refusal.value)) < 500


def test_what_is_endless_is_not_written_out() -> None:
    with pytest.raises(ConfigError, match="is not a table") as refusal:
        parse_fleet(yaml.safe_load(BOMB))
    assert len(str(refusal.value)) < 500


def test_step_times_from_a_file_that_says_one_twice(tmp_path: Path) -> None:
    (tmp_path / "engine.yaml").write_text("prefill_token_s: 1e-5\nprefill_token_s: 2e-5\n")
    with pytest.raises(ConfigError, match="line 2: prefill_token_s is there twice"):
        read_times("engine.yaml", 1000, tmp_path)
