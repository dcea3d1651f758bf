"""Opens the REMOTE tier that a URL names."""

from __future__ import annotations

import importlib.util
import os
import ssl
import stat
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.errors import ConfigError
from headwater.places import RemoteSpec
from headwater.ports import LowerTier
from headwater.tiers.codec import Codec
from headwater.tiers.endpoint import Endpoint
from headwater.tiers.object_store import SHARED_MODE, ObjectStoreTier
from headwater.tiers.redis import RedisTier

if TYPE_CHECKING:
    from obstore.store import ObjectStore

CONNECT_S = 1
CALL_S = 60
"""No call to an object store lasts longer, whatever its deadline."""


def open_remote(spec: RemoteSpec, codec: Codec | None = None) -> LowerTier:
    """The tier of a URL; it connects when it is first used. Without a codec payloads stay as they are.

    Raises ConfigError.
    """
    if spec.is_redis:
        return RedisTier(
            endpoint_of(spec),
            codec,
            cluster=spec.cluster,
            connections=spec.connections,
            ttl_s=spec.ttl_s,
            capacity_bytes=spec.capacity_bytes,
        )
    if importlib.util.find_spec("obstore") is None:
        raise ConfigError(f"{spec.name} needs a library that is not installed: pip install 'headwater[object-store]'")
    directory = check_directory(spec.path, shared=spec.shared) if spec.scheme == "file" else None
    return ObjectStoreTier(
        _store(spec),
        spec.name,
        codec,
        cluster=spec.cluster,
        connections=spec.connections,
        directory=directory,
        shared=spec.shared,
    )


def endpoint_of(spec: RemoteSpec) -> Endpoint:
    """Where a Redis or Valkey server is, and who we are there."""
    return Endpoint(
        name=spec.name,
        host=spec.host,
        port=spec.port,
        path=spec.path,
        user=spec.user,
        password=spec.password,
        database=spec.database,
        tls=_trust(spec) if spec.has_tls else None,
    )


def _trust(spec: RemoteSpec) -> ssl.SSLContext:
    """Whose certificates are believed: those of the CA file, or those that the machine believes."""
    try:
        return ssl.create_default_context(cafile=spec.ca or None)
    except OSError as error:
        raise ConfigError(f"{spec.name}: the CA file {spec.ca} cannot be used: {error.strerror or error}") from None


def check_directory(path: str, *, shared: bool = False) -> str:
    """The directory of a shared file system, made for us alone if only it is missing, not what it is in.

    Raises ConfigError where it is a symbolic link or no directory, and where others may look or write into it: who
    writes there may put links in our way. With `shared` its group may.
    """
    place = Path(path)
    try:
        with suppress(FileExistsError):
            place.mkdir(mode=0o700)
            if shared:
                place.chmod(SHARED_MODE)
        found = place.lstat()
    except OSError as error:
        raise ConfigError(f"file://{path}: {error.strerror}; is the file system mounted?") from None
    if why := refusal(path, found, shared=shared):
        raise ConfigError(f"file://{path}{why}")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"file://{path}: user {os.getuid()} may not read and write there")
    return path


def refusal(path: str, found: os.stat_result, *, shared: bool) -> str:
    """What is wrong with a directory that is there, and the remedy; empty if nothing is."""
    mode = f"{stat.S_IMODE(found.st_mode):04o}"
    if not stat.S_ISDIR(found.st_mode):
        return " is no directory, or a symbolic link; name the directory itself"
    if found.st_mode & stat.S_IRWXO:
        return f": everybody may look or write there (mode {mode}); chmod o= {path}"
    if shared:
        return ""
    if found.st_mode & stat.S_IRWXG:
        return f": its group may look or write there (mode {mode}); chmod 700 {path}, or trust the group: ?shared=true"
    if found.st_uid != os.geteuid():
        return (
            f": it is user {found.st_uid}'s; name a directory of this user, or trust its owner and group: ?shared=true"
        )
    return ""


def _store(spec: RemoteSpec) -> ObjectStore:
    from obstore.exceptions import BaseError
    from obstore.store import AzureStore, GCSStore, LocalStore, S3Store

    if spec.scheme == "file":
        return LocalStore(spec.path)
    client: dict[str, Any] = {"connect_timeout": timedelta(seconds=CONNECT_S), "timeout": timedelta(seconds=CALL_S)}
    if spec.endpoint.startswith("http://"):
        client["allow_http"] = True
    if spec.ca:
        client["root_certificate"] = _pem(spec)
    # Our own breaker decides when to try again.
    retry: dict[str, Any] = {"max_retries": 1, "retry_timeout": timedelta(seconds=CALL_S)}
    config: dict[str, Any] = {}
    if spec.endpoint:
        config["endpoint"] = spec.endpoint
    if spec.scheme == "s3":
        # Every chunk has a checksum of its own, so signing each payload's SHA-256 would only cost time.
        config |= {"unsigned_payload": True, "region": spec.region} if spec.region else {"unsigned_payload": True}
        if spec.user:
            config |= {"access_key_id": spec.user, "secret_access_key": spec.password}
    elif spec.scheme == "az":
        config |= {"account_name": spec.account or spec.user} if spec.account or spec.user else {}
        config |= {"account_key": spec.password} if spec.password else {}
    kinds: dict[str, Any] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
    try:
        store: ObjectStore = kinds[spec.scheme](
            spec.host, prefix=spec.path or None, config=config, client_options=client, retry_config=retry
        )
    except (BaseError, ValueError) as error:
        raise ConfigError(f"{spec.name}: {str(error).splitlines()[0][:200]}") from None
    return store


def _pem(spec: RemoteSpec) -> bytes:
    try:
        return Path(spec.ca).read_bytes()
    except OSError as error:
        raise ConfigError(f"{spec.name}: the CA file {spec.ca}: {error.strerror}") from None
