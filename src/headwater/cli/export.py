"""`headwater export`: manifests from the same file that `headwater up` runs."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from headwater.cli.options import add_json
from headwater.errors import ConfigError
from headwater.fleetfile.read import read_fleet
from headwater.up.compose import compose
from headwater.up.kube_objects import object_name
from headwater.up.kubernetes import ON_CPUS, ON_GPUS, kubernetes, secrets_of
from headwater.up.machine import look
from headwater.up.manifests import Images

EXAMPLES = """\
examples:
  headwater export kubernetes fleet.yaml -o manifests && kubectl apply -f manifests
  headwater export compose fleet.yaml -o deploy && docker compose -f deploy/compose.yaml up

No secret is written: what is printed says which the manifests refer to. Engines' images need vLLM and headwater.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """What to write, from what, and where to."""
    defaults = Images()
    parser.epilog = EXAMPLES
    parser.add_argument("kind", choices=("kubernetes", "compose"), help="for many hosts, or for this one")
    parser.add_argument("fleet", metavar="FLEET.yaml", help="what `headwater up` takes")
    parser.add_argument("-o", "--output", metavar="DIR", required=True, help="folder for the manifests")
    parser.add_argument("--image", default=defaults.headwater, help="of nodes and Conductor (default: %(default)s)")
    parser.add_argument("--engine-image", default=defaults.engine, help="of engines (default: %(default)s)")
    parser.add_argument("--cpu", action="store_true", help="engines compute on CPUs")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write them, and say what is to be made beside them."""
    fleet = read_fleet(arguments.fleet, look_up=None)
    images = Images(arguments.image, arguments.engine_image)
    folder = Path(arguments.output)
    if arguments.kind == "kubernetes":
        found = kubernetes(fleet, images, ON_CPUS if arguments.cpu else ON_GPUS)
        files, variables = secrets_of(fleet)
        words = [f"--from-file={it}=FILE" for it in files] + [f"--from-literal={it}=..." for it in variables]
        notes = [f"kubectl create secret generic {object_name(fleet, 'secrets')} {' '.join(words)}"]
    else:
        machine = look()
        if not arguments.cpu and not machine.gpus:
            raise ConfigError(
                "there is no GPU here, whose numbers the file would name; add --cpu, or export on that host"
            )
        found = compose(fleet, images, ON_CPUS if arguments.cpu else machine)
        notes = [f"files with secrets, of mode 0600: {folder}/secrets/NAME, as compose.yaml names them"]
        notes.append("export HEADWATER_UID=$(id -u) HEADWATER_GID=$(id -g)")
    write(folder, found, arguments.kind)
    if arguments.json:
        print(json.dumps({"written": [str(folder / name) for name in found], "before": notes}))
        return 0
    print(
        "\n".join([*(f"wrote {folder / name}" for name in found), "before they are used:", *map("  {}".format, notes)])
    )
    return 0


def write(folder: Path, found: dict[str, str], kind: str) -> None:
    """The files, which replace those of the same name; for Compose the folders that it mounts. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in found.items():
            (folder / name).write_text(text, encoding="utf-8")
        if kind == "compose":
            for name in ("cache", "secrets"):
                (folder / name).mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--output {folder}: {os.strerror(error.errno or 0)}; name a folder that can be made"
        ) from error
