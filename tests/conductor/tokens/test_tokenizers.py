"""Tokenizers from a model's folder give the ids that transformers gives."""

import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from headwater.conductor.job import Kind, Parsed
from headwater.conductor.tokens import asked
from headwater.conductor.tokens.local import Found, adds_special, find_ids
from headwater.conductor.tokens.memo import ENTRY_BYTES, Memo
from headwater.conductor.tokens.tokenizers import LocalTokenizer, NoTokenizer, truncate
from tests.conductor.tokens.chats import CASES, LLAMA, QWEN, chat, folder, text, user

BOS = {"content": "<bos>", "lstrip": False, "rstrip": False, "normalized": False, "__type": "AddedToken"}
PROMPT = "Once upon a <|im_start|>time\n 東京 🙂 "


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False},
        {"bos_token": BOS, "add_bos_token": True},
        {"split_special_tokens": True},
        {"added_tokens_decoder": {"2048": {"content": "a <", "special": False, "normalized": False}}},
        {"model_max_length": 4},
    ],
    ids=range(8),
)  # fmt: skip
def test_same_ids_as_transformers(config: dict[str, Any], model_dir: Path, tmp_path: Path) -> None:
    at = folder(tmp_path / "model", model_dir, LLAMA, **config)
    ours, theirs = LocalTokenizer(at), AutoTokenizer.from_pretrained(at)
    for special in (True, False):
        assert list(ours.ids(PROMPT, special=special)) == theirs.encode(PROMPT, add_special_tokens=special)
    template = ours.template(tools=False)
    assert template is not None
    assert template.render(chat(CASES["turns"]).fields, 1 << 16) == theirs.apply_chat_template(
        CASES["turns"]["messages"], tokenize=False, add_generation_prompt=True
    )


def test_truncation_and_padding_of_the_file_are_off(model_dir: Path, tmp_path: Path) -> None:
    at = folder(tmp_path / "model", model_dir)
    plain = LocalTokenizer(at)
    fields = json.loads((at / "tokenizer.json").read_text())
    fields["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    fields["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "x",
    }  # fmt: skip
    (at / "tokenizer.json").write_text(json.dumps(fields))
    assert LocalTokenizer(at).ids(PROMPT, special=True) == plain.ids(PROMPT, special=True)


def test_templates_are_those_of_the_files_or_of_the_configuration(model_dir: Path, tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]

    def rendered(tokenizer: LocalTokenizer) -> list[str | None]:
        found = [tokenizer.template(tools=tools) for tools in (False, True)]
        return [None if it is None else it.render({"messages": [user("a")]}, 99) for it in found]

    config = folder(tmp_path / "a", model_dir, chat_template=named)
    files = folder(tmp_path / "b", model_dir, "file", chat_template="configuration")
    assert rendered(LocalTokenizer(config)) == ["plain", "tools"]
    assert rendered(LocalTokenizer(files)) == ["file", "file"]
    (files / "additional_chat_templates").mkdir()
    (files / "additional_chat_templates" / "tool_use.jinja").write_text("more")
    assert rendered(LocalTokenizer(files)) == ["file", "more"]
    assert rendered(LocalTokenizer(folder(tmp_path / "c", model_dir, chat_template="only"))) == ["only", "only"]
    assert rendered(LocalTokenizer(folder(tmp_path / "d", model_dir))) == [None, None]
    assert rendered(LocalTokenizer(folder(tmp_path / "e", model_dir, "{% for %}"))) == [None, None]
    own = folder(tmp_path / "f", model_dir, "x")
    (own / "config.json").write_text('{"model_type": "gpt_oss"}')
    assert rendered(LocalTokenizer(own)) == [None, None]


def test_special_tokens_of_older_folders(model_dir: Path, tmp_path: Path) -> None:
    at = folder(tmp_path / "model", model_dir, "{{ bos_token }}{{ sep_token }}")
    (at / "special_tokens_map.json").write_text('{"bos_token": {"content": "<b>"}, "sep_token": "<s>"}')
    template = LocalTokenizer(at).template(tools=False)
    assert template is not None and template.render({"messages": [user("a")]}, 99) == "<b><s>"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "{"),
        ("config.json", b"\xff"),
    ],
    ids=range(4),
)
def test_folders_without_a_tokenizer(name: str, content: str | bytes | None, model_dir: Path, tmp_path: Path) -> None:
    at = folder(tmp_path / "model", model_dir)
    if content is None:
        (at / name).unlink()
    else:
        (at / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(NoTokenizer):
        LocalTokenizer(at)


@pytest.mark.parametrize(
    ("most", "side", "whole", "expected"),
    [
        (None, None, False, [1, 2, 3, 4]),
        (4, None, False, [1, 2, 3, 4]),
        (2, None, True, [3, 4]),
        (2, None, False, None),
        (2, "left", False, [3, 4]),
        (2, "right", False, [1, 2]),
        (0, None, True, []),
        (-1, None, True, None),
        (True, None, True, None),
        (2, "up", True, None),
    ],
    ids=range(10),
)
def test_truncates_as_the_engine(most: Any, side: Any, whole: bool, expected: Sequence[int] | None) -> None:
    assert truncate([1, 2, 3, 4], most, side, whole=whole) == expected


def test_finds_ids_or_says_why_not(model_dir: Path, tmp_path: Path) -> None:
    at = folder(tmp_path / "model", model_dir, QWEN)
    fields = json.loads((at / "tokenizer.json").read_text())
    processor = fields["post_processor"]
    processor["special_tokens"] = {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}}
    processor["single"].insert(0, {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}})
    (at / "tokenizer.json").write_text(json.dumps(fields))
    tokenizer = LocalTokenizer(at)
    plain = tokenizer.ids(PROMPT, special=False)
    assert find_ids(tokenizer, text(PROMPT), 99).ids == array("I", [1, *plain])
    assert find_ids(tokenizer, text(PROMPT, add_special_tokens=False), 99).ids == plain
    assert find_ids(tokenizer, text(PROMPT, add_special_tokens=False, truncate_prompt_tokens=2), 99).ids == plain[-2:]
    assert find_ids(tokenizer, text(PROMPT, truncate_prompt_tokens=2), 99) == Found(None, "truncate")
    assert find_ids(tokenizer, text("a" * 100), 99) == Found(None, "long")
    assert find_ids(tokenizer, Parsed(Kind.COMPLETION, {}, "model"), 99) == Found(None, "prompts")
    assert find_ids(tokenizer, chat({"messages": [user("a" * 100)]}), 99) == Found(None, "template")
    assert find_ids(tokenizer, chat({"messages": [user([{"type": "file"}])]}), 99) == Found(None, "template")
    bare = LocalTokenizer(folder(tmp_path / "bare", model_dir))
    assert find_ids(bare, chat({"messages": [user("a")]}), 99) == Found(None, "template")
    assert not adds_special(chat({"messages": []})) and adds_special(chat({"add_special_tokens": True}))
    timed = LocalTokenizer(folder(tmp_path / "timed", model_dir, "{{ strftime_now('%H') }}"))
    assert not find_ids(timed, chat({"messages": [user("a")]}), 99).keep


def test_remembers_within_bounds() -> None:
    memo, row = Memo(8 * (ENTRY_BYTES + 400)), array("I", range(100))
    keys = [bytes([number]) * 32 for number in range(20)]
    for key in keys[:8]:
        memo.put(key, row)
    assert memo.get(keys[0]) == row, "and it is now the one that was asked for last"
    memo.put(keys[0], row)
    memo.put(keys[8], row)
    assert memo.get(keys[1]) is None and memo.get(keys[0]) == row and len(memo) == 8
    assert memo.used_bytes == 8 * (ENTRY_BYTES + 400)
    memo.put(keys[9], array("I", range(2000)))
    assert memo.get(keys[9]) is None, "larger than a quarter of all"
    memo.clear()
    assert (len(memo), memo.used_bytes, memo.get(keys[0])) == (0, 0, None)


def test_asks_for_what_the_request_would_give() -> None:
    assert json.loads(asked.question(text("a", add_special_tokens=False, tools=[1]), "theirs")) == {
        "model": "theirs", "prompt": "a", "add_special_tokens": False,
    }  # fmt: skip
    fields = {
        "messages": [user("a"), {"role": "assistant", "content": "b", "reasoning_content": "c"}],
        "reasoning_effort": "low", "documents": [{"text": "d"}], "chat_template_kwargs": {"x": 1}, "max_tokens": 3,
    }  # fmt: skip
    question = json.loads(asked.question(chat(fields)))
    assert question["chat_template_kwargs"] == {
        "x": 1, "reasoning_effort": "low", "documents": [{"text": "d"}], "enable_thinking": True,
    }  # fmt: skip
    assert question["messages"][1]["reasoning"] == "c" and "max_tokens" not in question
    assert asked.answer(b'{"tokens":[1,2],"count":2}') == array("I", [1, 2])
    for wrong in (b"", b"{}", b'{"tokens":[-1]}', b'{"tokens":["a"]}', b'{"error":{}}'):
        assert asked.answer(wrong) is None
