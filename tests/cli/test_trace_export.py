"""`headwater trace export` and `trace facts`: what a log becomes, that nothing said is in it, and what is refused."""

from __future__ import annotations

import gzip
import json
import random
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jinja2 import TemplateError

from headwater.traces.facts import facts
from headwater.traces.read import read
from tests.commands import Command, ran

SUBSTRING = 3
WORDS = ("river", "stone", "lantern", "quiet", "harbour", "velvet", "copper", "meadow", "winter", "thunder")


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """Runs `headwater trace ...` in an empty folder."""
    monkeypatch.chdir(tmp_path)

    return partial(ran, capsys, "trace")


def save(*records: dict[str, Any], path: str = "log.jsonl") -> None:
    Path(path).write_text("".join(json.dumps(it) + "\n" for it in records))


def row(at: object, ids: list[int], **more: Any) -> dict[str, Any]:
    return {"timestamp": at, "prompt_token_ids": ids, "output_length": 4, **more}


def test_a_log_becomes_a_trace(command: Command) -> None:
    prompt = list(range(5000, 5040))
    save(
        row("2026-11-16T10:00:02.500Z", prompt, session="b"),
        row("2026-11-16T10:00:00Z", prompt[:36], session="a"),
        row("2026-11-16T10:00:04.0004Z", [*prompt[:32], 1], session="a", priority=1),
    )
    ended = command("export", "log.jsonl", "--out", "t.jsonl", "--block-tokens", "16")
    assert (ended.code, ended.err) == (0, "") and "wrote t.jsonl: 3 requests; no text, no token ids" in ended.out
    lines = [json.loads(it) for it in Path("t.jsonl").read_text().splitlines()]
    sessions = [it.pop("session") for it in lines]
    assert sessions[0] == sessions[2] != sessions[1] and all(re.fullmatch("[0-9a-f]{12}", it) for it in sessions)
    assert lines == [
        {"timestamp": 0, "input_length": 36, "output_length": 4, "hash_ids": [0, 1, 3]},
        {"timestamp": 2500, "input_length": 40, "output_length": 4, "hash_ids": [0, 1, 2]},
        {"timestamp": 4000, "input_length": 33, "output_length": 4, "hash_ids": [0, 1, 4], "priority": 1},
    ]


def test_the_summary_as_json_is_what_facts_says(command: Command) -> None:
    save(row(1_763_000_000, [1] * 40), row(1_763_000_001.25, [1] * 40))
    ended = command("export", "log.jsonl", "--out", "t.jsonl", "--block-tokens", "16", "--json")
    said = json.loads(ended.out)
    assert (said.pop("ok"), said.pop("out"), said.pop("skipped")) == (True, "t.jsonl", 0)
    assert said == json.loads(json.dumps(facts(read("t.jsonl").trace).as_dict()))
    assert (said["requests"], said["span_s"], said["reuse_max"]) == (2, 1.25, 0.5)
    told = json.loads(command("facts", "t.jsonl", "--json").out)
    assert (told.pop("ok"), told.pop("skipped"), told.pop("notes")) == (True, 0, []) and told == said
    table = command("facts", "t.jsonl").out
    assert "2 (1.6 a second)" in table and "50.0% of the prompt tokens" in table


def talk(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


@pytest.mark.parametrize("block_tokens", ["16", "512"])
def test_no_part_of_a_prompt_is_in_the_trace(command: Command, block_tokens: str, seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    said = [talk(rng, 12) for _ in range(30)]
    names = [f"{rng.choice(WORDS)}-{rng.randrange(10**9)}" for _ in range(60)]
    # Token ids from 7,000,000 on: every number in the trace is smaller.
    records = [
        row(1_763_000_000 + n, [7_000_000 + ord(it) for it in text], prompt=text, completion=text[::-1])
        | {"messages": [{"role": "user", "content": text}], "session": names[2 * n], "user": names[2 * n + 1]}
        for n, text in enumerate(said)
    ]
    save(*records)
    assert command("export", "log.jsonl", "--out", "t.jsonl", "--block-tokens", block_tokens).code == 0
    written = Path("t.jsonl").read_text()
    # The keys of the format, and the hexadecimal names, are no part of what was said.
    held = re.sub(r'"(timestamp|input_length|output_length|hash_ids|session|tenant|block_tokens)":', "", written)
    held = re.sub(r'"[0-9a-f]{12}"', "", held)
    assert not re.search("[a-zA-Z]", held)
    for text in (*said, *names):
        for at in range(len(text) - SUBSTRING + 1):
            part = text[at : at + SUBSTRING]
            assert part.isdigit() or part not in held
    assert not [it for it in re.findall("[0-9]+", held) if int(it) >= 7_000_000]
    assert not set(names) & set(re.findall(r'"([^"]+)"', written))
    assert sorted(it.name for it in Path().iterdir()) == ["log.jsonl", "t.jsonl"]


def test_bad_lines_are_refused_or_left_out_and_never_quoted(command: Command) -> None:
    lines = [json.dumps(row(1_763_000_000, [1])), '{"prompt": "secret', json.dumps(row("secret", [1]))]
    Path("log.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    ended = command("export", "log.jsonl.gz", "--out", "t.jsonl")
    assert ended.code == 2 and "log.jsonl.gz, line 2: line = '...': not JSON (JSON is malformed" in ended.err
    assert "--skip-bad" in ended.err and "secret" not in ended.err and not Path("t.jsonl").exists()
    ended = command("export", "log.jsonl.gz", "--out", "t.jsonl", "--skip-bad")
    assert ended.code == 0 and "1 requests, 2 lines skipped" in ended.out
    assert "note: skipped: log.jsonl.gz, line 3: timestamp = '...'" in ended.err and "secret" not in ended.err
    assert len(read("t.jsonl").trace.requests) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("log.jsonl", "--out", "./log.jsonl"), "this is the log itself"),
        (("none", "--out", "t"), "none: No such file"),
        (("empty", "--out", "t"), "empty: no requests"),
        (("log.jsonl", "--out", "none/t"), "--out none/t: no file can be there"),
        (("log.jsonl", "--out", "t", "--field", "x=y"), "--field 'x=y': write NAME=PATH"),
        (("text.jsonl", "--out", "t"), "line 1: prompt = '...': it is text; name the model's tokenizer"),
        (("text.jsonl", "--out", "t", "--skip-bad"), "text.jsonl: no requests; first: text.jsonl, line 1"),
        (("log.jsonl", "--out", "t", "--tokenizer", "no-such-folder/x"), "--tokenizer 'no-such-folder/x'"),
    ],
)
def test_what_cannot_be_exported_is_refused_in_a_line(
    command: Command, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # seconds to import
    save(row(1_763_000_000, [1]))
    save(row(1_763_000_000, [], prompt="hello") | {"prompt_token_ids": None}, path="text.jsonl")
    Path("empty").touch()
    ended = command("export", *arguments)
    if "--tokenizer" in arguments:
        said = "--tokenizer: transformers is missing; pip install transformers"
    assert ended.code == 2 and said in ended.err and ended.err.count("\n") == 1 and not ended.out


class Model:
    """A tokenizer with transformers' surface: a token is a letter."""

    chat_template = "yes"

    @classmethod
    def from_pretrained(cls, model: str, *, local_files_only: bool) -> Model:
        assert local_files_only
        if model == "none":
            raise OSError("nothing there\nmore")
        found = cls()
        found.chat_template = "" if model == "bare" else "yes"
        return found

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(it) for it in text]

    def apply_chat_template(self, messages: Any, *, tools: Any, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize and add_generation_prompt
        if messages[0]["role"] != "user":
            raise TemplateError(messages[0]["content"])
        return "".join(f"<{it['content']}>" for it in messages) + str(tools or "")


def test_messages_go_through_the_models_template(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=Model))
    chat = [{"role": "user", "content": "velvet"}]
    save(
        {"timestamp": 1_763_000_000, "messages": chat, "completion": "ab"},
        row(1_763_000_001, [ord(it) for it in "<velvet>"]),
        {"timestamp": 1_763_000_002, "messages": [{"role": "tool", "content": "secret"}], "output_length": 1},
        {"timestamp": 1_763_000_003, "prompt": "<velvet>", "output_length": 1},
    )
    arguments = ("export", "log.jsonl", "--out", "t.jsonl", "--block-tokens", "16", "--tokenizer")
    ended = command(*arguments, "model", "--skip-bad")
    assert ended.code == 0 and "line 3: messages = '...': the model's chat template does not take them" in ended.err
    assert "secret" not in ended.err
    first, second, last = read("t.jsonl", block_tokens=16).trace.requests
    assert first.blocks == second.blocks != last.blocks  # the prompt has the model's start in front
    assert [(it.input_tokens, it.output_tokens) for it in (first, second, last)] == [(8, 3), (8, 4), (9, 1)]
    assert "--tokenizer 'none': no tokenizer there (nothing there)" in command(*arguments, "none").err
    assert "--tokenizer 'bare': the model has no chat template" in command(*arguments, "bare", "--skip-bad").err
