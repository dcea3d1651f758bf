"""Command line options that several subcommands share: flags made from the tree of settings, and `--json`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from typing import TypeVar

from headwater.cli.show import show_setting
from headwater.config import (
    FILE_VARIABLE,
    SECTIONS,
    SETTINGS,
    Effective,
    default_value,
    directory_place,
    disk_place,
    load_config,
    variable,
)
from headwater.errors import ConfigError
from headwater.values import (
    absolute_path,
    host_and_port,
    host_and_port_or_none,
    loopback_address,
    memory_backing,
    memory_size,
    parse_duration,
    parse_size,
    size_or_auto,
    socket_address,
)

T = TypeVar("T")
METAVARS = {
    memory_size: "SIZE",
    parse_size: "SIZE",
    size_or_auto: "SIZE|auto",
    parse_duration: "DURATION",
    socket_address: "ADDRESS",
    loopback_address: "HOST:PORT",
    memory_backing: "memfd|DIRECTORY",
    absolute_path: "FILE",
    disk_place: "DIRECTORY:SIZE",
    directory_place: "URL",
    host_and_port: "HOST:PORT",
    host_and_port_or_none: "HOST:PORT",
}
FLAGS = {
    "node.remotes": "--remote",
    "node.quotas": "--quota",
    "node.labels": "--label",
    "node.cluster_quotas": "--cluster-quota",
}
"""Flags that are not named after their setting."""
REPEATED = {"dict[str, str]": "FIELD=VALUE", "dict[str, int]": "TENANT=SIZE", "tuple[str, ...]": "URL"}
SPELLINGS = "Sizes: 512MiB, 32GiB, 0.5g (powers of 1024), 32GB (10**9). Durations: 30s, 500ms, 2m."


def reader(read: Callable[[object], T]) -> Callable[[str], T]:
    """A reader of configuration values as the `type` of an argparse option."""

    def read_option(text: str) -> T:
        try:
            return read(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None

    return read_option


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json`, on every command that reports."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def add_config(parser: argparse.ArgumentParser) -> None:
    """`--config FILE`."""
    parser.add_argument("--config", metavar="FILE", help=f"TOML file with settings (default: {FILE_VARIABLE})")


def add_settings(parser: argparse.ArgumentParser, section: str) -> None:
    """A flag for each setting of a section; `read_config` finds them again."""
    for it in fields(SECTIONS[section]):
        add_setting(parser, f"{section}.{it.name}", flag_of(f"{section}.{it.name}"))


def flag_of(name: str) -> str:
    """The flag of a setting: `--host-memory` for node.host_memory."""
    return FLAGS.get(name, "--" + name.partition(".")[2].replace("_", "-"))


def add_setting(parser: argparse.ArgumentParser, name: str, flag: str) -> None:
    """A flag for one setting. Its text is read with the rest of the configuration, not by argparse."""
    it = SETTINGS[name]
    default = show_setting(name, default_value(name))
    purpose = f"{it.metadata['help']} (default: {default}; {variable(name)})".replace("%", "%%")
    if it.type == "bool":
        parser.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, default=None, help=purpose)
    elif it.type in REPEATED:
        metavar = REPEATED[it.type]
        parser.add_argument(flag, dest=name, action="append", metavar=metavar, help=f"{purpose}; may be repeated")
    else:
        metavar = METAVARS.get(it.metadata["parse"], "NUMBER" if it.type == "int" else "WORD")
        parser.add_argument(flag, dest=name, metavar=metavar, help=purpose)


def read_config(arguments: argparse.Namespace) -> Effective:
    """The configuration that a command line asks for; raises ConfigError."""
    flags = {name: value for name, value in vars(arguments).items() if name in SETTINGS}
    return load_config(arguments.config, overrides=flags)
