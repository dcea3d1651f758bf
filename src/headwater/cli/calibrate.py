"""The part of `headwater simulate` that measures a real engine: `--calibrate URL`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from headwater.calibrate.calibration import Options, calibrate, check
from headwater.calibrate.file import Calibrated, write
from headwater.calibrate.fit import FitError
from headwater.calibrate.probe import Effort
from headwater.calibrate.verify import Verified
from headwater.cli.bars import Bar
from headwater.cli.show import console, plain, show_count
from headwater.config import secret
from headwater.errors import ConfigError

DEFAULT = Effort()
VERIFY_S = 60.0
TERMS = {
    "prefill_fixed_s": "a step with prompt tokens",
    "prefill_token_s": "a prompt token",
    "prefill_token2_s": "a pair of new tokens of one step",
    "prefill_context_s": "a new token with a token of its context",
    "decode_fixed_s": "a decode step",
    "decode_request_s": "a request that decodes",
    "decode_kv_s": "a token of their KV",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """`--calibrate` and what belongs to it; `--seed` and `--json` are the command's own."""
    group = parser.add_argument_group("measuring a real engine (instead of simulating)")
    group.add_argument(
        "--calibrate", metavar="URL",
        help="measure the idle OpenAI-compatible server there, and fit its step times",
    )  # fmt: skip
    group.add_argument("--out", metavar="FILE", help="write them there, for a fleet file's `times: FILE`")
    group.add_argument(
        "--verify", nargs="?", type=float, const=VERIFY_S, metavar="S",
        help=f"then send other requests for about S seconds (default: {VERIFY_S:g}), and simulate the same ones",
    )  # fmt: skip
    group.add_argument(
        "--seconds", type=float, default=DEFAULT.seconds, metavar="S",
        help=f"how long to measure (default: {DEFAULT.seconds:g})",
    )  # fmt: skip
    group.add_argument(
        "--concurrency", type=int, default=DEFAULT.concurrency, metavar="N",
        help=f"the most streams at a time (default: {DEFAULT.concurrency})",
    )  # fmt: skip
    group.add_argument("--max-length", type=int, metavar="TOKENS", help="the longest prompt (default: the server's)")
    group.add_argument("--step-tokens", type=int, metavar="TOKENS", help="of prompts in a step (default: measured)")
    group.add_argument(
        "--requests-max", type=int, default=256, metavar="N", help="requests in a step, as configured (default: 256)"
    )
    group.add_argument("--capacity", type=int, metavar="TOKENS", help="of KV (default: what the server says)")
    group.add_argument("--engine-block", type=int, metavar="TOKENS", help="of its blocks (default: as it says)")
    group.add_argument("--served-model", metavar="NAME", help="which of its models (default: the first)")
    group.add_argument("--api-key-env", metavar="VARIABLE", help="the environment variable that has its key")
    group.add_argument(
        "--request-timeout", type=float, default=300.0, metavar="S", help="for one request (default: 300)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, show, write, verify."""
    options = _options(arguments)
    if arguments.out is not None and not Path(arguments.out).absolute().parent.is_dir():
        raise ConfigError(f"--out {arguments.out}: there is no such directory")  # before minutes of measuring
    with Bar("measuring") as bar:
        calibrated = calibrate(arguments.calibrate, options, lambda done, what: bar.advance(done, 1.0))
    if arguments.out is not None:
        write(Path(arguments.out), calibrated)
    verified = None
    if arguments.verify is not None:
        with Bar("verifying") as bar:
            verified = check(
                arguments.calibrate, options, calibrated, arguments.verify, lambda done, what: bar.advance(done, 1.0)
            )
    if arguments.json:
        print(json.dumps(_as_dict(calibrated, verified)))
    else:
        _print(calibrated, verified)
        if arguments.out is not None:
            print(f"wrote {arguments.out}")
    return 0


def _options(arguments: argparse.Namespace) -> Options:
    positive = ("max_length", "step_tokens", "requests_max", "capacity", "engine_block", "request_timeout")
    for name in positive:
        value = getattr(arguments, name)
        if value is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}: write a number above 0")
    key = None
    if arguments.api_key_env is not None:
        key = secret(arguments.api_key_env)
        if key is None:
            raise ConfigError(f"--api-key-env {arguments.api_key_env}: this variable is not set, or empty")
    effort = Effort(
        arguments.seconds, arguments.concurrency, arguments.max_length, arguments.step_tokens, arguments.seed
    )
    return Options(
        key, arguments.served_model, arguments.request_timeout, arguments.capacity, arguments.engine_block,
        arguments.requests_max, effort,
    )  # fmt: skip


def _as_dict(calibrated: Calibrated, verified: Verified | None) -> dict[str, Any]:
    told: dict[str, Any] = {"ok": True, **calibrated.as_dict()}
    if verified is not None:
        told["verified"] = asdict(verified) | {"ttft_error": verified.ttft_error, "tpot_error": verified.tpot_error}
    return told


def _print(calibrated: Calibrated, verified: Verified | None) -> None:
    screen = console()
    fitted, served = calibrated.fitted, calibrated.served
    screen.print(f"engine: {plain(served.model)} at {calibrated.url}")
    if served.block_tokens and served.capacity_tokens:
        room = show_count(served.capacity_tokens)
        screen.print(f"room: {room} tokens of KV in blocks of {served.block_tokens}")
    terms = Table("what", Column("costs", justify="right"), title="Step times", title_justify="left")
    for name, what in TERMS.items():
        terms.add_row(what, _time(getattr(fitted.times, name)))
    terms.add_row("prompt tokens in a step", show_count(fitted.times.step_tokens))
    screen.print(terms)
    screen.print(_errors({"prefill": fitted.prefill, "decode": fitted.decode}))
    measured = fitted.measured
    screen.print(
        f"measured: {_span(measured.prefill_tokens)} new tokens after {_span(measured.prefill_context)} cached ones; "
        f"{_span(measured.decode_requests)} requests with {_span(measured.decode_kv_tokens)} tokens of KV in all; "
        "beyond that, the fit is a guess"
    )
    for note in fitted.notes:
        screen.print(f"note: {plain(note)}")
    if verified is not None:
        screen.print(_verified(verified))


def _errors(kinds: dict[str, FitError]) -> Table:
    right = [Column(name, justify="right") for name in ("points", "median", "p90", "median, left out", "p90, left out")]
    table = Table("error of", *right, title="How well they tell what was measured", title_justify="left")
    for kind, it in kinds.items():
        shares = (it.median, it.p90, it.left_out_median, it.left_out_p90)
        table.add_row(kind, str(it.points), *(f"{100 * share:.1f} %" for share in shares))
    return table


def _verified(it: Verified) -> Table:
    right = [Column(name, justify="right") for name in ("engine", "simulated", "error")]
    title = f"{it.requests} requests that were not measured (seed {it.seed})"
    table = Table("mean", *right, title=title, title_justify="left")
    table.add_row("time to first token", _time(it.measured_ttft_s), _time(it.predicted_ttft_s), f"{it.ttft_error:+.1%}")
    table.add_row("time per token", _time(it.measured_tpot_s), _time(it.predicted_tpot_s), f"{it.tpot_error:+.1%}")
    return table


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def _span(numbers: tuple[int, int]) -> str:
    return f"{show_count(numbers[0])} to {show_count(numbers[1])}"
