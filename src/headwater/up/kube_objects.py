"""The Kubernetes objects that a fleet's manifests are made of: names, labels, hardened pods and containers, probes.

An init container copies the secret's files to memory with mode 0600, as nodes and Conductors take them only so.
"""

from __future__ import annotations

from typing import Any

from headwater.fleetfile.model import FleetFile
from headwater.fleetfile.secrets import PLACEHOLDER
from headwater.up.manifests import PRIVATE, RUN, USER

Object = dict[str, Any]
TMP = "/tmp"
SECRETS = "/etc/headwater/secrets"
LEAVE_S = 5
"""Until nobody sends to a pod that is to end."""


def object_name(fleet: FleetFile, part: str) -> str:
    """CLUSTER-PART, in letters that Kubernetes takes."""
    return f"{fleet.cluster.lower().replace('_', '-').replace('.', '-')}-{part}"


def labels_of(fleet: FleetFile, part: str) -> dict[str, str]:
    """What selectors find it by."""
    return {
        "app.kubernetes.io/name": "headwater",
        "app.kubernetes.io/instance": object_name(fleet, part),
        "app.kubernetes.io/part-of": object_name(fleet, "fleet"),
        "app.kubernetes.io/component": "conductor" if part == "conductor" else "engines",
    }


def named_object(version: str, kind: str, fleet: FleetFile, part: str) -> Object:
    """The head of an object; its spec is added to it."""
    labels = labels_of(fleet, part)
    return {"apiVersion": version, "kind": kind, "metadata": {"name": object_name(fleet, part), "labels": labels}}


def deployment(
    fleet: FleetFile, part: str, spec: Object, grace_s: float, volumes: list[Object], files: list[str]
) -> Object:
    """One pod, kept running. `spec` has its containers; `files` are those of the secret that they get in PRIVATE."""
    labels = labels_of(fleet, part)
    volumes = [
        {"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}},
        {"name": "tmp", "emptyDir": {}},
        *volumes,
    ]
    if files:
        items = [{"key": it, "path": it} for it in files]
        volumes += [
            {"name": "private", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
            {
                "name": "secrets",
                "secret": {"secretName": object_name(fleet, "secrets"), "defaultMode": 0o440, "items": items},
            },
        ]
    pod = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "terminationGracePeriodSeconds": round(grace_s) + LEAVE_S,
        **spec,
        "volumes": volumes,
    }
    return named_object("apps/v1", "Deployment", fleet, part) | {
        "spec": {
            "replicas": 1,
            "strategy": {"type": "RollingUpdate" if part == "conductor" else "Recreate"},
            "selector": {"matchLabels": {"app.kubernetes.io/instance": object_name(fleet, part)}},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        }
    }


def container_of(name: str, image: str, command: list[str], environment: list[Object]) -> Object:
    """A container that may write to nothing but its volumes, and can become nobody else."""
    return {
        "name": name,
        "image": image,
        "command": [literal(it) for it in command],
        "env": environment,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "run", "mountPath": RUN}, {"name": "tmp", "mountPath": TMP}],
    }


def literal(text: str) -> str:
    """Text in which Kubernetes sees no variable."""
    return text.replace("$(", "$$(")


def environment_of(fleet: FleetFile, settings: dict[str, str]) -> list[Object]:
    """Variables; those that the fleet file only names come from the secret."""
    found: list[Object] = []
    for name, text in sorted(settings.items()):
        if (named := PLACEHOLDER.fullmatch(text)) is None:
            found.append({"name": name, "value": literal(text)})
        else:
            reference = {"name": object_name(fleet, "secrets"), "key": named[1]}
            found.append({"name": name, "valueFrom": {"secretKeyRef": reference}})
    return found


def copy_secrets(image: str) -> Object:
    """The init container of pods with files of the secret."""
    command = ["sh", "-c", f"umask 077 && cp {SECRETS}/* {PRIVATE}/"]
    container = container_of("secrets", image, command, [])
    container["volumeMounts"] = [
        {"name": "secrets", "mountPath": SECRETS, "readOnly": True},
        {"name": "private", "mountPath": PRIVATE},
    ]
    return container


def http_probe(path: str, port: int, *, every_s: int, failures: int) -> Object:
    """A probe by HTTP."""
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": every_s,
        "timeoutSeconds": 3,
        "failureThreshold": failures,
    }
