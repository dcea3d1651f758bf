"""What Kubernetes (1.29) and Compose take, as far as we write it: strict, so that a misspelt field is found."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
TRUTH: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"}
PORT_NAME: Schema = {"type": "string", "pattern": "^[a-z0-9-]{1,15}$"}
SIZE: Schema = {"type": "string", "pattern": "^[0-9]+([KMGT]i?)?$"}
PATH: Schema = {"type": "string", "pattern": "^/"}


def table(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "properties": {**required, **(optional or {})},
    }


def rows(item: Schema, least: int = 1) -> Schema:
    return {"type": "array", "items": item, "minItems": least}


def mapping(value: Schema) -> Schema:
    return {"type": "object", "additionalProperties": value}


def const(value: Any) -> Schema:
    return {"const": value}


LABELS = mapping({"type": "string", "pattern": "^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"})
META = table({"name": NAME, "labels": LABELS})
SELECTOR = table({"matchLabels": LABELS})
EXEC = table({"command": rows(TEXT)})
HTTP = table({"path": PATH, "port": PORT})
PROBE: Schema = {
    **table(
        {"periodSeconds": COUNT, "timeoutSeconds": COUNT, "failureThreshold": COUNT}, {"httpGet": HTTP, "exec": EXEC}
    ),
    "oneOf": [{"required": ["httpGet"]}, {"required": ["exec"]}],
}
VARIABLE: Schema = {
    **table(
        {"name": {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$"}},
        {"value": TEXT, "valueFrom": table({"secretKeyRef": table({"name": NAME, "key": TEXT})})},
    ),
    "oneOf": [{"required": ["value"]}, {"required": ["valueFrom"]}],
}
# What the restricted level of the Pod Security Standards asks for, and a root that cannot be written.
HARDENED = table(
    {
        "allowPrivilegeEscalation": const(False),
        "readOnlyRootFilesystem": const(True),
        "capabilities": table({"drop": const(["ALL"])}),
    }
)
AMOUNTS = mapping(SIZE)
CONTAINER = table(
    {
        "name": NAME,
        "image": TEXT,
        "command": rows(TEXT),
        "env": rows(VARIABLE, 0),
        "securityContext": HARDENED,
        "volumeMounts": rows(table({"name": NAME, "mountPath": PATH}, {"readOnly": TRUTH})),
    },
    {
        "ports": rows(table({"containerPort": PORT}, {"name": PORT_NAME})),
        "resources": table({}, {"requests": AMOUNTS, "limits": AMOUNTS}),
        "startupProbe": PROBE,
        "readinessProbe": PROBE,
        "livenessProbe": PROBE,
        "lifecycle": table({"preStop": table({"exec": EXEC})}),
    },
)
VOLUME: Schema = {
    **table(
        {"name": NAME},
        {
            "emptyDir": table({}, {"medium": const("Memory"), "sizeLimit": SIZE}),
            "hostPath": table({"path": PATH, "type": const("Directory")}),
            "configMap": table({"name": NAME}),
            "secret": table(
                {
                    "secretName": NAME,
                    "defaultMode": {"type": "integer", "minimum": 0, "maximum": 0o777},
                    "items": rows(table({"key": TEXT, "path": TEXT})),
                }
            ),
        },
    ),
    "minProperties": 2,
    "maxProperties": 2,
}
POD = table(
    {
        "automountServiceAccountToken": const(False),
        "enableServiceLinks": const(False),
        "securityContext": table(
            {
                "runAsNonRoot": const(True),
                "runAsUser": {"type": "integer", "minimum": 1},
                "runAsGroup": {"type": "integer", "minimum": 1},
                "fsGroup": {"type": "integer", "minimum": 1},
                "seccompProfile": const({"type": "RuntimeDefault"}),
            }
        ),
        "terminationGracePeriodSeconds": COUNT,
        "containers": rows(CONTAINER),
        "volumes": rows(VOLUME),
    },
    {"initContainers": rows(CONTAINER)},
)
DEPLOYMENT = table(
    {
        "apiVersion": const("apps/v1"),
        "kind": const("Deployment"),
        "metadata": META,
        "spec": table(
            {
                "replicas": COUNT,
                "strategy": table({"type": {"enum": ["Recreate", "RollingUpdate"]}}),
                "selector": SELECTOR,
                "template": table({"metadata": table({"labels": LABELS}), "spec": POD}),
            }
        ),
    }
)
SERVICE = table(
    {
        "apiVersion": const("v1"),
        "kind": const("Service"),
        "metadata": META,
        "spec": table(
            {
                "selector": LABELS,
                "ports": rows(table({"name": PORT_NAME, "port": PORT, "targetPort": {"anyOf": [PORT, PORT_NAME]}})),
            },
            {"publishNotReadyAddresses": TRUTH},
        ),
    }
)
CONFIG_MAP = table({"apiVersion": const("v1"), "kind": const("ConfigMap"), "metadata": META, "data": mapping(TEXT)})
POLICY = table(
    {
        "apiVersion": const("networking.k8s.io/v1"),
        "kind": const("NetworkPolicy"),
        "metadata": META,
        "spec": table(
            {
                "podSelector": SELECTOR,
                "policyTypes": const(["Ingress"]),
                "ingress": rows(
                    table(
                        {},
                        {
                            "from": rows(table({"podSelector": SELECTOR})),
                            "ports": rows(table({"protocol": const("TCP"), "port": PORT})),
                        },
                    )
                ),
            }
        ),
    }
)
KUBERNETES = {"Deployment": DEPLOYMENT, "Service": SERVICE, "ConfigMap": CONFIG_MAP, "NetworkPolicy": POLICY}

SPAN: Schema = {"type": "string", "pattern": "^[0-9]+s$"}
AT = table({"source": TEXT, "target": PATH})
COMPOSE_VOLUME = table(
    {"type": {"enum": ["volume", "bind"]}, "source": TEXT, "target": PATH},
    {"read_only": TRUTH, "bind": table({"create_host_path": TRUTH})},
)
COMPOSE_SERVICE = table(
    {
        "image": TEXT,
        "command": rows(TEXT),
        "environment": mapping(TEXT),
        "network_mode": const("host"),
        "user": TEXT,
        "read_only": const(True),
        "cap_drop": const(["ALL"]),
        "security_opt": const(["no-new-privileges:true"]),
        "tmpfs": rows(PATH),
        "volumes": rows(COMPOSE_VOLUME),
        "restart": const("unless-stopped"),
        "stop_grace_period": SPAN,
        "healthcheck": table(
            {
                "test": {"type": "array", "items": TEXT, "minItems": 2},
                "interval": SPAN,
                "timeout": SPAN,
                "retries": COUNT,
                "start_period": SPAN,
                "start_interval": SPAN,
            }
        ),
    },
    {
        "depends_on": mapping(table({"condition": const("service_healthy")})),
        "mem_limit": COUNT,
        "shm_size": COUNT,
        "secrets": rows(AT),
        "configs": rows(AT),
        "deploy": table(
            {
                "resources": table(
                    {
                        "reservations": table(
                            {
                                "devices": rows(
                                    table(
                                        {
                                            "driver": const("nvidia"),
                                            "device_ids": rows(TEXT),
                                            "capabilities": const(["gpu"]),
                                        }
                                    )
                                )
                            }
                        )
                    }
                )
            }
        ),
    },
)
COMPOSE = table(
    {
        "name": {"type": "string", "pattern": "^[a-z0-9][a-z0-9_-]*$"},
        "services": mapping(COMPOSE_SERVICE),
        "volumes": mapping(table({"driver": const("local"), "driver_opts": mapping(TEXT)})),
        "configs": mapping(table({"file": TEXT})),
        "secrets": mapping(table({"file": TEXT})),
    }
)
