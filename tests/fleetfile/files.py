"""Fleet files of tests, written out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headwater.fleetfile.model import FleetFile
from headwater.fleetfile.read import read_fleet

DIGEST = "sha256:" + "ab" * 32
OTHER = "sha256:" + "cd" * 32
LEAST = "model: /models/smol\ninstances:\n  - {name: chat}\n"
CLUSTER_TENANTS = f"tenants: [{{name: blue, keys: [{DIGEST}]}}]\n"
WHOLE = f"""
cluster: blue
model: /models/smol
served_name: smol
flags: --enforce-eager --max-model-len 2048
environment: {{HF_HUB_OFFLINE: 1, HF_TOKEN: "${{HF_TOKEN}}"}}
node: near
directory: valkey
secret_file: secret
slo: {{ttft_s: 2s, tpot_s: 100ms}}
nodes:
  - {{name: near, host_memory: 1GiB, prefault: false, labels: {{zone: a}}, remotes: ["redis://kv:6379", "s3://kv/a"]}}
  - {{name: far, socket: "unix:/run/far.sock"}}
instances:
  - {{name: chat, count: 3, environment: {{HF_HUB_OFFLINE: 0}}}}
  - {{name: long, node: far, flags: [--max-model-len, 8192], port: 9000, ranks: 2}}
  - {{name: alone, node: off, events: off}}
  - {{name: theirs, url: "http://10.0.0.5:8000", events: "tcp://10.0.0.5:5557", capacity_tokens: 1000}}
conductor:
  listen: 0.0.0.0:8000
  tls: off
  workers: 2
  limits: {{body_bytes: 1MiB}}
  times: {{drain_s: 3s}}
tenants:
  - {{name: blue, keys: [{DIGEST}, {OTHER}], weight: 2, slo: {{ttft_s: 1s}}, models: [smol]}}
"""
SECRET = "c0ffee" * 8

Read = Callable[[str], FleetFile]


def written(folder: Path, text: str) -> Path:
    """A file with this text, and beside it the secret that it names."""
    secret = folder / "secret"
    secret.write_text(SECRET + "\n")
    secret.chmod(0o600)
    path = folder / "fleet.yaml"
    path.write_text(text)
    return path


def read(folder: Path, text: str, variables: dict[str, str] | None = None) -> FleetFile:
    """A fleet from its text and the variables that it names."""
    return read_fleet(written(folder, text), look_up=(variables or {"HF_TOKEN": "hf_canary"}).get)
