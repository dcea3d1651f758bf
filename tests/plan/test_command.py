"""`headwater plan` as people and programs see it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Ended, ran

TRACE = [
    {"timestamp": 0, "input_length": 1024, "output_length": 100, "hash_ids": [0, 1]},
    {"timestamp": 1000, "input_length": 512, "output_length": 50, "hash_ids": [7]},
    {"timestamp": 2000, "input_length": 1536, "output_length": 300, "hash_ids": [0, 1, 2]},
]


@dataclass
class Planned(Ended):
    def figure(self, key: str, name: str) -> Any:
        """One figure of what was printed as JSON."""
        return next(it for it in self.answer(key)["figures"] if it["name"] == name)["value"]

    def answer(self, key: str) -> Any:
        return next(it for it in self.json["answers"] if it["key"] == key)

    def origins(self, key: str) -> dict[str, str]:
        return {it["name"]: it["origin"] for it in self.answer(key)["inputs"]}


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> Planned:
    found = ran(capsys, "plan", *words)
    return Planned(found.code, found.out, found.err)


def test_everything_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "llama-3.1-70b", "--link", "nic=50", "--json")
    assert found.code == 0, found.err
    keys = [it["key"] for it in json.loads(found.out)["answers"]]
    assert keys == ["model", "kv_token", "kv_chunk", "transfer", "capacity", "speed", "fetch", "split", "cost"]
    for it in json.loads(found.out)["answers"]:
        assert it["formula"] and it["inputs"] and it["figures"], it["key"]
    assert found.figure("kv_token", "a token") == 327_680
    assert found.figure("kv_chunk", "all ranks") == 80 << 20
    assert found.figure("transfer", "bytes") == 1.25 * 2**30
    assert found.figure("transfer", "nic") == pytest.approx(0.026844, rel=1e-4)
    # 4 x H100: 3 requests of 40 GiB in 147.3 GiB; half of 1 TiB holds 12, half of 8 TiB 102.
    assert found.figure("capacity", "without offload, an instance") == 3
    assert found.figure("capacity", "without offload, a GPU") == 3 / 4
    assert found.figure("capacity", "with HOST, a GPU") == 15 / 4
    assert found.figure("capacity", "with HOST and DISK, a GPU") == 117 / 4
    # The layers' and the head's 69,503,033,344 weights of 2 bytes, and 8,192 + 256 tokens of 327,680 bytes, at 0.7 of
    # 4 * 3.35 TB/s.
    step_s = (2 * 69_503_033_344 + 8448 * 327_680) / 9.38e12
    assert found.figure("speed", "decode step of 1") == pytest.approx(step_s)


def test_as_people_read_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "llama-3.1-70b", "--link", "nic=50")
    lines = [line.rstrip() for line in found.out.splitlines()]
    assert lines[0] == "llama-3.1-70b on 4 x h100 an instance"
    start = lines.index("Moving 4,096 tokens")
    assert [line.split() for line in lines[start + 1 : start + 5]] == [
        ["bytes", "1.25", "GiB"],
        ["nic", "26.84", "ms", "as", "given"],
        ["nvlink4", "942.1", "us", "DEVICE", "of", "a", "neighbour"],
        ["pcie5", "6.678", "ms", "HOST"],
    ]
    assert any(line.startswith("inputs") and "rate of nic 50 GB/s (option)" in line for line in lines)
    assert sum(line.startswith("formula") for line in lines) == 9


def test_what_has_no_figure_is_a_dash_and_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "llama-3.1-8b", "--link", "slow=0.001")
    assert any(line.split()[:5] == ["slow", "-", "never", "up", "to"] for line in found.out.splitlines())


def test_what_costs_nothing_saves_no_share(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(plan(capsys, "llama-3.1-8b", "--gpu-price", "0", "--dram-price", "0", "--json").out)
    cost = next(it for it in found["answers"] if it["key"] == "cost")
    assert [(it["value"], it["note"]) for it in cost["figures"] if it["name"] == "saved"] == [
        (None, "GPUs cost nothing")
    ]


def test_inputs_say_where_they_came_from(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 4096,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = plan(capsys, str(tmp_path), "--kv-dtype", "fp8", "--gpu", "own=8GiB,10,1", "--gpu-price", "1", "--json")
    assert found.figure("kv_token", "a token") == 2 * 2 * 2 * 16
    assert found.origins("model")["hidden size"] == "config.json"
    token, cost = found.origins("kv_token"), found.origins("cost")
    assert (token["width of KV"], token["length"], token["GPUs an instance (tp)"]) == (
        "option",
        "config.json",
        "computed",
    )
    assert found.origins("capacity")["GPU memory"] == "option"
    longer = plan(capsys, str(tmp_path), "--length", "8k", "--json")
    assert longer.figure("kv_token", "a request of 8,192 tokens on its GPUs") == 8192 * 256
    assert (cost["a GPU hour"], cost["a GB of DRAM a month"]) == ("option", "assumed")


def test_a_trace_gives_sizes_lengths_and_reuse(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps(it) + "\n" for it in TRACE))
    words = ["qwen3-8b", "--trace", str(file), "--hit-rate", "0.1", "--hit-rate", "0.9", "--json"]
    found = plan(capsys, *words)
    # Of 3,072 tokens 1,024 hit, in a cache of 3 blocks (7, 0, 1); 0.1 is 307 tokens: block 0, behind block 7.
    assert found.figure("tiers", "the most there is to hit") == pytest.approx(1 / 3)
    assert found.figure("tiers", "for 10.0 %") == 2 * 512 * 147_456
    assert found.figure("tiers", "for 90.0 %") is None
    assert "the most is 33.3 %" in found.out
    assert found.figure("tiers", "hit rate of DEVICE and HOST") == pytest.approx(1 / 3)
    split = {it["name"]: (it["value"], it["origin"]) for it in found.answer("split")["inputs"]}
    assert (split["input"], split["output"]) == ((1024, "file"), (150, "file"))
    assert split["reuse"] == (pytest.approx(1 / 3), "file")
    given = plan(capsys, *words, "--input", "2k", "--reuse", "0.25")
    assert [it["value"] for it in given.answer("split")["inputs"] if it["name"] in ("input", "reuse")] == [2048, 0.25]
    assert given.origins("split")["input"] == given.origins("split")["reuse"] == "option"
    assert given.origins("split")["output"] == "file"


def test_measured_times_replace_the_roofline(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "times.yaml"
    file.write_text("times: {prefill_fixed_s: 0.01, prefill_token_s: 0.0001, decode_fixed_s: 0.02}\n")
    found = plan(capsys, "qwen3-8b", "--times", str(file), "--input", "8k", "--json")
    assert found.answer("speed")["title"] == "Step times, measured"
    assert found.figure("speed", "prefill of 8,192 tokens") == pytest.approx(0.01 + 0.8192)
    assert found.figure("speed", "decode step of 64") == 0.02


def test_splitting_pays_when_prefills_would_stall_many(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Steps cost the same for any batch, so that decoding alone is far cheaper in large batches."""
    file = tmp_path / "times.yaml"
    file.write_text("times: {prefill_fixed_s: 0, prefill_token_s: 0.0001, decode_fixed_s: 0.02}\n")
    words = ("llama-3.1-8b", "--times", str(file), "--json", "--reuse", "0")
    assert plan(capsys, *words, "--tpot-slo", "25ms").figure("split", "does it pay").startswith("yes: it serves")
    verdict = plan(capsys, *words, "--ttft-slo", "820ms").figure("split", "does it pay")
    assert verdict == "no: apart does not meet the SLOs"


def test_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "--list")
    assert found.code == 0
    for name in ("deepseek-v3", "h100", "roce-400g"):
        assert name in found.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "MODEL is missing"),
        (["lama-3.1-70b"], "MODEL 'lama-3.1-70b'"),
        (["absent.json"], "absent.json: No such file"),
        (["llama-3.1-70b", "--tp", "3"], "--tp 3"),
        (["llama-3.1-70b", "--tp", "0"], "argument --tp: '0': not a whole number from 1 to 64"),
        (["llama-3.1-405b", "--tp", "2"], "--tp 2: the weights of llama-3.1-405b take 756 GiB"),
        (["llama-3.1-405b", "--gpu", "l40s", "--length", "100m"], "--gpu l40s: up to 64 of them"),
        (["qwen3-8b", "--chunk-tokens", "100"], "--chunk-tokens 100"),
        (["qwen3-8b", "--reuse", "2"], "argument --reuse: '2': not a number from 0 to 1"),
        (["qwen3-8b", "--busy", "nan"], "argument --busy: 'nan': not a number from 0.01 to 1"),
        (["qwen3-8b", "--input", "4x"], "argument --input: '4x': not a number of tokens"),
        (["qwen3-8b", "--input", "0"], "argument --input: '0'"),
        (["qwen3-8b", "--kv-dtype", "q"], "argument --kv-dtype: 'q': not one of fp32"),
        (["qwen3-8b", "--handoff", "zz"], "--handoff 'zz'"),
        (["qwen3-8b", "--link", "a=1", "--link", "a=2"], "--link 'a=2': a is there twice"),
        (["qwen3-8b", "--hit-rate", "0.2"], "--hit-rate 0.2 needs requests to hit; give --trace"),
        (["qwen3-8b", "--trace", "absent.jsonl"], "absent.jsonl"),
        (["qwen3-8b", "--times", "absent.yaml"], "--times absent.yaml: "),
        (["qwen3-8b", "--times", "odd"], "--times odd: 'odd' is neither one of"),
    ],
)
def test_bad_input_is_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, *words)
    assert found.code == 2
    assert message in found.err
    assert "Traceback" not in found.err


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-next-80b-a3b", "gpt-oss-120b", "gemma-3-27b", "jamba-v0.1"])
def test_models_of_every_kind(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, name, "--gpu", "h200", "--length", "32k")
    assert found.code == 0 and "Cost of a million tokens" in found.out
