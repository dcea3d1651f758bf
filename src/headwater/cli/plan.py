"""`headwater plan`: what a fleet needs for a model, each answer with its formula and its inputs."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from headwater.cli.options import SPELLINGS, add_json, reader
from headwater.cli.plan_rows import as_json, known_models, report
from headwater.cli.show import console
from headwater.enginetimes import EngineTimes
from headwater.errors import ConfigError
from headwater.plan.answer import Origin
from headwater.plan.capacity import TP_MAX, least_tp
from headwater.plan.configs import read_config
from headwater.plan.cost import Prices
from headwater.plan.gpus import Gpu, parse_gpu
from headwater.plan.known import CONFIGS, known_shape
from headwater.plan.links import WAYS, WayIn, parse_way
from headwater.plan.memory import device_tokens, tier_tokens
from headwater.plan.question import Question
from headwater.plan.report import answers
from headwater.plan.shapes import ModelShape
from headwater.plan.sizes import hit_curve
from headwater.sim.fleet.config import read_times
from headwater.traces.model import Trace
from headwater.traces.read import read
from headwater.values import GIB, nearest, one_of, parse_duration, parse_size, whole_number

EXAMPLES = f"""\
examples:
  headwater plan llama-3.1-70b
  headwater plan ./config.json --gpu h200 --tp 4 --link nic=50 --transfer 4k
  headwater plan deepseek-v3 --input 32k --reuse 0.6 --ttft-slo 3s --tpot-slo 40ms
  headwater plan qwen3-32b --trace conversation.jsonl --hit-rate 0.3 --json
  headwater plan --list

What nobody has given is assumed, and said to be: look at the inputs of the answer that matters to you. An instance is
`--tp` GPUs; HOST and DISK are a host's. Step times are a roofline over data sheets, until --times gives measured ones.
A trace also gives the lengths of requests and how much of them is reused. {SPELLINGS} Tokens: 8192, 8k, 1m (of 1024).
"""

KV_WIDTHS = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0}
WEIGHT_WIDTHS = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5, "fp4": 0.5}
NETWORK = ("tcp-25g", "roce-100g", "roce-200g", "roce-400g")
HANDOFF = "roce-400g"
LENGTH_TOKENS = 131072
TOKENS_MAX = 1 << 30


def tokens(value: object) -> int:
    """A number of tokens: `8192`, `8k`, `1m`, at least 1."""
    found = re.fullmatch(r"([0-9]{1,10})\s*([km]?)", str(value).strip().lower())
    count = int(found.group(1)) * {"": 1, "k": 1024, "m": 1 << 20}[found.group(2)] if found else 0
    if not 1 <= count <= TOKENS_MAX:
        raise ConfigError(f"not a number of tokens from 1 to {TOKENS_MAX}; write 8192, 8k or 1m")
    return count


def number(least: float, most: float) -> Callable[[object], float]:
    """A reader of numbers within limits, both included."""

    def parse(value: object) -> float:
        try:
            found = float(str(value))
        except ValueError:
            found = math.nan
        if not least <= found <= most:
            raise ConfigError(f"not a number from {least:g} to {most:g}")
        return found

    return parse


share, some_share, dollars = number(0.0, 1.0), number(0.01, 1.0), number(0.0, 1e6)

# field of Question: flag, reader, metavar, what it is
VALUES: dict[str, tuple[str, Callable[[object], Any], str, str]] = {
    "transfer_tokens": ("--transfer", tokens, "TOKENS", "length whose transfer times are told"),
    "length_tokens": ("--length", tokens, "TOKENS", "length of the requests that are to fit"),
    "input_tokens": ("--input", tokens, "TOKENS", "prompt of a request"),
    "output_tokens": ("--output", tokens, "TOKENS", "answer of a request"),
    "chunk_tokens": ("--chunk-tokens", tokens, "TOKENS", "tokens of a chunk of the cache"),
    "block_tokens": ("--block-tokens", tokens, "TOKENS", "tokens of an engine's block"),
    "reuse": ("--reuse", share, "SHARE", "part of a prompt that the cache has"),
    "device_reuse": ("--device-reuse", share, "SHARE", "part of a prompt that instances have without it"),
    "utilization": ("--utilization", some_share, "SHARE", "part of GPU memory that the engine uses"),
    "reserve_bytes": ("--reserve", parse_size, "SIZE", "GPU memory for activations"),
    "mfu": ("--mfu", some_share, "SHARE", "part of the GPU's FLOP/s that prefill reaches"),
    "mbu": ("--mbu", some_share, "SHARE", "part of the GPU's bandwidth that decode reaches"),
    "dram_bytes": ("--dram", parse_size, "SIZE", "HOST tier of a host"),
    "ssd_bytes": ("--ssd", parse_size, "SIZE", "DISK tier of a host"),
    "host_gpus": ("--host-gpus", whole_number(1, 64), "COUNT", "GPUs of a host"),
    "instances": ("--instances", whole_number(2, 100_000), "COUNT", "instances of the fleet"),
    "batch_max": ("--batch", whole_number(1, 65536), "COUNT", "most requests that an engine decodes at once"),
    "ttft_slo_s": ("--ttft-slo", parse_duration, "DURATION", "time to the first token to keep"),
    "tpot_slo_s": ("--tpot-slo", parse_duration, "DURATION", "mean time per output token to keep"),
    "busy": ("--busy", some_share, "SHARE", "part of the time that GPUs work"),
}
PRICES = {
    "gpu_price": ("--gpu-price", "gpu_hour", "dollars an hour of a GPU"),
    "dram_price": ("--dram-price", "dram_gb_month", "dollars a month of a GB (10**9) of DRAM"),
    "ssd_price": ("--ssd-price", "ssd_gb_month", "dollars a month of a GB (10**9) of SSD"),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """The model, its hardware, its load, and `--json`."""
    parser.epilog = EXAMPLES
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a config.json, its folder, or a known model's name")
    parser.add_argument("--list", action="store_true", help="the known models, GPUs and links")
    parser.add_argument("--gpu", metavar="NAME", help="a known GPU, or NAME=memory,TFLOP/s,TB/s (default: h100)")
    parser.add_argument(
        "--tp", type=reader(whole_number(1, TP_MAX)), metavar="COUNT",
        help="GPUs an instance (default: the least power of two that holds the weights and one request)",
    )  # fmt: skip
    parser.add_argument("--kv-dtype", type=reader(one_of(*KV_WIDTHS)), metavar="DTYPE", help=", ".join(KV_WIDTHS))
    parser.add_argument(
        "--weight-dtype", type=reader(one_of(*WEIGHT_WIDTHS)), metavar="DTYPE", help=", ".join(WEIGHT_WIDTHS)
    )
    parser.add_argument(
        "--link", action="append", default=[], metavar="NAME", help="one more link: a known one, or NAME=GB/s[,us]"
    )
    parser.add_argument("--handoff", metavar="NAME", help=f"the link from prefill to decode (default: {HANDOFF})")
    parser.add_argument("--times", metavar="FILE", help="measured step times: the YAML file that a calibration wrote")
    parser.add_argument("--trace", metavar="FILE", help="requests with block hashes, for tier sizes")
    parser.add_argument(
        "--hit-rate", action="append", default=[], type=reader(share), metavar="SHARE", help="a hit rate wanted on it"
    )
    for name, (flag, read_value, metavar, purpose) in VALUES.items():
        default = f" (default: {_default(name)})"
        parser.add_argument(flag, dest=name, type=reader(read_value), metavar=metavar, help=purpose + default)
    for name, (flag, price, purpose) in PRICES.items():
        default = f" (default: {getattr(Prices(), price):g})"
        parser.add_argument(flag, dest=name, type=reader(dollars), metavar="DOLLARS", help=purpose + default)
    add_json(parser)


def _default(name: str) -> str:
    value = next(it.default for it in fields(Question) if it.name == name)
    assert isinstance(value, int | float), f"{name} has no default"
    return f"{value / GIB:g}GiB" if name.endswith("_bytes") else f"{value:g}"


def run(arguments: argparse.Namespace) -> int:
    """Print the plan."""
    if arguments.list:
        console().print(known_models())
        return 0
    if not arguments.model:
        raise ConfigError(f"MODEL is missing; give a config.json or one of {', '.join(CONFIGS)}")
    ask = question(arguments)
    found = answers(ask)
    if arguments.json:
        print(json.dumps(as_json(ask, found)))
    else:
        console().print(report(ask, found))
    return 0


def question(arguments: argparse.Namespace) -> Question:
    """What a command line asks. Raises ConfigError."""
    origins: dict[str, Origin] = {}
    shape = _shape(arguments, origins)
    gpu = parse_gpu(arguments.gpu or "h100")
    if arguments.gpu and "=" in arguments.gpu:
        origins["gpu"] = Origin.OPTION
    kv_width = KV_WIDTHS[arguments.kv_dtype] if arguments.kv_dtype else shape.kv_width
    origins["kv_width"] = Origin.OPTION if arguments.kv_dtype else origins["shape"]
    given = {name: value for name in VALUES if (value := getattr(arguments, name)) is not None}
    origins |= dict.fromkeys(given, Origin.OPTION)
    if "length_tokens" not in given and 0 < shape.tokens_max < LENGTH_TOKENS:
        given["length_tokens"], origins["length_tokens"] = shape.tokens_max, origins["shape"]
    prices = {PRICES[name][1]: value for name in PRICES if (value := getattr(arguments, name)) is not None}
    origins |= {name: Origin.OPTION for name in PRICES if getattr(arguments, name) is not None}
    ways = _ways(arguments, gpu, origins)
    ask = Question(
        shape=shape,
        gpu=gpu,
        tp=arguments.tp or 1,
        kv_width=kv_width,
        ways=ways,
        handoff=_handoff(arguments.handoff or HANDOFF, ways),
        hit_rates=tuple(arguments.hit_rate),
        prices=replace(Prices(), **prices),
        origins=origins,
        **given,
    )
    origins["tp"] = Origin.OPTION if arguments.tp else Origin.COMPUTED
    ask = replace(ask, tp=arguments.tp or _least_tp(ask))
    if arguments.times:
        ask = replace(ask, times=_times(arguments.times, device_tokens(ask)))
    if not arguments.trace:
        if arguments.hit_rate:
            raise ConfigError(f"--hit-rate {arguments.hit_rate[0]:g} needs requests to hit; give --trace FILE as well")
        return ask
    return with_trace(ask, read(arguments.trace).trace)


def with_trace(ask: Question, trace: Trace) -> Question:
    """The same question about a trace's requests: their mean lengths, and what the fleet's tiers hit of them, as far as
    the user has not said otherwise."""
    curve, count = hit_curve(trace), len(trace.requests)
    found: dict[str, Any] = {
        "input_tokens": max(round(curve.input_tokens / count), 1),
        "output_tokens": max(round(sum(it.output_tokens for it in trace.requests) / count), 1),
    }
    device, _, all_tiers = tier_tokens(ask)
    found["reuse"] = curve.rate(all_tiers // curve.block_tokens)
    found["device_reuse"] = curve.rate(device // curve.block_tokens)
    origins = dict.fromkeys(found, Origin.FILE) | dict(ask.origins)
    given = {name: value for name, value in found.items() if name not in ask.origins}
    return replace(ask, curve=curve, origins=origins, **given)


def _shape(arguments: argparse.Namespace, origins: dict[str, Origin]) -> ModelShape:
    path = Path(arguments.model)
    if path.exists() or path.suffix == ".json":
        shape, origins["shape"] = read_config(path), Origin.CONFIG
    else:
        shape, origins["shape"] = known_shape(arguments.model), Origin.TABLE
    if arguments.weight_dtype:
        width, origins["weight_dtype"] = WEIGHT_WIDTHS[arguments.weight_dtype], Origin.OPTION
        shape = replace(shape, dense_width=width, routed_width=width)
    return shape


def _ways(arguments: argparse.Namespace, gpu: Gpu, origins: dict[str, Origin]) -> tuple[WayIn, ...]:
    """Those of the command line, then the GPU's own and the usual ones."""
    found: dict[str, WayIn] = {}
    for text in arguments.link:
        way = parse_way(text)
        if way.name in found:
            raise ConfigError(f"--link {text!r}: {way.name} is there twice; leave one of them")
        found[way.name] = way
        if "=" in text:
            origins[f"way {way.name}"] = Origin.OPTION
    for name in (gpu.peer_way, gpu.host_way, "nvme-x4", *NETWORK):
        if name:
            found.setdefault(name, WAYS[name])
    return tuple(found.values())


def _handoff(name: str, ways: tuple[WayIn, ...]) -> WayIn:
    known = {it.name: it for it in ways} | {
        it.name: it for it in WAYS.values() if it.name not in {w.name for w in ways}
    }
    if name not in known:
        raise ConfigError(
            f"--handoff {name!r} is not among the links, the nearest is {nearest(name, known)!r}; "
            f"define it with --link {name}=GB/s"
        )
    return known[name]


def _times(given: str, capacity_tokens: int) -> EngineTimes:
    try:
        return read_times(given, capacity_tokens)
    except ConfigError as error:
        raise ConfigError(f"--times {given}: {error}") from None


def _least_tp(ask: Question) -> int:
    weights = ask.shape.weight_bytes
    tp = least_tp(ask.shape, ask.gpu, ask.kv_width, ask.length_tokens, weights, ask.utilization, ask.reserve_bytes)
    if tp is None:
        raise ConfigError(
            f"--gpu {ask.gpu.name}: up to {TP_MAX} of them do not hold the weights of {ask.shape.name} "
            f"({weights / GIB:.0f} GiB) and a request of {ask.length_tokens:,} tokens; use a larger GPU or a smaller "
            "--length"
        )
    return tp
