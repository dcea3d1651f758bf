"""The last step of the set-up: does vLLM start here, is the C kernel there, can the model be read?"""

import importlib
import importlib.metadata
import json
import sys
from pathlib import Path

# The library and the command line fail in different ways where the environment is wrong, so both are imported.
from vllm import LLM
from vllm.entrypoints.cli.main import main as vllm_command


def kernel_loads() -> bool:
    """Whether the C kernel was built and can be loaded."""
    try:
        importlib.import_module("headwater._kernels._copy")
    except ImportError:
        return False
    return True


def main() -> int:
    """Print one line for each thing that is well; any other outcome is an exception."""
    assert callable(LLM)
    print("C kernel built" if kernel_loads() else "C kernel absent: numpy does its work, slower")
    folder = Path(sys.argv[1])
    shape = json.loads((folder / "config.json").read_text())
    assert (shape["num_hidden_layers"], shape["num_key_value_heads"]) == (30, 3), shape
    print(f"model {folder.name}, {(folder / 'model.safetensors').stat().st_size / 1e6:.0f} MB")
    print("vLLM", importlib.metadata.version("vllm"), flush=True)
    sys.argv = ["vllm", "--version"]
    vllm_command()
    return 0


if __name__ == "__main__":
    sys.exit(main())
