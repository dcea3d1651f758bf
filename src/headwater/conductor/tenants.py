"""Who may ask, and how much: API keys, quotas, and a salt for each tenant. The `Tenants` of `parts`.

Keys are 256 random bits, and the fleet file has only their SHA-256. A slow hash (scrypt, Argon2) would protect what can
be guessed; 2**256 keys cannot be, and a request must not cost milliseconds of the loop before we know whose it is.

Timing tells nothing: all of a key is digested first, in a time that depends on its length alone. Then its digest is
looked up. Whoever sees how long a look-up takes learns at most about digests, whose preimages they cannot find, and the
comparison of a digest that was found takes the same time wherever it differs; one that was not found is compared too.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from headwater.conductor.quota_page import UNLIMITED, Quota, QuotaPage, Wait
from headwater.errors import ConfigError
from headwater.fleetfile.model import TenantSpec

PREFIX = "sk-hw-"
KEY_BITS = 256
AUTHORIZATION_BYTES = 512
"""Longer ones are nobody's, without being digested."""
SECRET_BYTES = 16
NOBODY = TenantSpec("")
_ROW = re.compile(r"sha256:([0-9a-f]{64})")
_SCHEME = b"bearer "
_NO_DIGEST = bytes(32)


def new_key() -> str:
    """An API key that nobody has."""
    return PREFIX + secrets.token_urlsafe(KEY_BITS // 8)


def key_row(key: str) -> str:
    """What the fleet file has instead of a key: sha256:HEX."""
    return "sha256:" + _digest(key.encode()).hex()


class KeyedTenants:
    """The tenants of one worker. Requests in progress keep theirs through `replace`."""

    def __init__(self, tenants: Sequence[TenantSpec], page: QuotaPage, secret: str = "") -> None:
        """Raises ConfigError. `secret` is the same in all Conductors of a fleet, or their salts differ."""
        self._page = page
        self._secret = hashlib.sha256(secret.encode()).digest()
        self._strong = len(secret.encode()) >= SECRET_BYTES
        self._tenants: Mapping[str, TenantSpec] = {}
        self._quotas: Mapping[str, Quota] = {}
        self._by_digest: Mapping[bytes, tuple[bytes, TenantSpec]] = {}
        self._in_progress: dict[str, int] = {}
        self._refused: dict[tuple[str, str], int] = {}
        self._tokens: dict[str, int] = {}
        self.unknown = 0
        """Requests without a key that somebody has."""
        self.replace(tenants)

    def replace(self, tenants: Sequence[TenantSpec]) -> None:
        """Other keys and quotas from now on, all of them or none: raises ConfigError and stays as it was."""
        if tenants and not self._strong:
            raise ConfigError(
                f"secret: tenants need one of at least {SECRET_BYTES} bytes, or their salts could be guessed; "
                "write one with `openssl rand -hex 32` and name its file in secret_file"
            )
        if self._tenants and not tenants:
            raise ConfigError("tenants: none are left, which would let everybody in; restart the Conductor for that")
        by_digest = _digests(tenants)
        self._by_digest = by_digest
        self._tenants = {it.name: it for it in tenants}
        self._quotas = {it.name: _quota_of(it) for it in tenants}
        for counted in (self._in_progress, self._tokens):
            for name in [name for name in counted if name not in self._tenants and not self._in_progress.get(name)]:
                del counted[name]
        self._refused = {key: count for key, count in self._refused.items() if key[0] in self._tenants}

    def who(self, authorization: bytes | None) -> TenantSpec | None:
        """See `parts.Tenants`. The scheme may be spelt in any case (RFC 9110, 11.1)."""
        if not self._tenants:
            return NOBODY
        given = authorization or b""
        key = b""
        if len(given) <= AUTHORIZATION_BYTES and given[: len(_SCHEME)].lower() == _SCHEME:
            key = given[len(_SCHEME) :].strip(b" ")
        digest = _digest(key)
        known, tenant = self._by_digest.get(digest, (_NO_DIGEST, NOBODY))
        if hmac.compare_digest(known, digest):
            return tenant
        self.unknown += 1
        return None

    def named(self, name: str) -> TenantSpec | None:
        """The tenant of that name; None without tenants."""
        return self._tenants.get(name)

    def enter(self, tenant: TenantSpec, now: float) -> float | None:
        """See `parts.Tenants`."""
        if tenant is NOBODY:  # nothing limits nobody, now or after a roll: the page that workers share need not know
            self._in_progress[""] = self._in_progress.get("", 0) + 1
            return None
        wait = self.take(tenant, now)
        return None if wait is None else wait.seconds

    def take(self, tenant: TenantSpec, now: float) -> Wait | None:
        """`enter`, which also says which quota is spent. The quota is the one that the tenant has by now."""
        wait = self._page.enter(tenant.name, self._quota(tenant), now)
        if wait is None:
            self._in_progress[tenant.name] = self._in_progress.get(tenant.name, 0) + 1
        else:
            key = (tenant.name, wait.reason)
            self._refused[key] = self._refused.get(key, 0) + 1
        return wait

    def used(self, tenant: TenantSpec, tokens: int, now: float) -> None:
        """See `parts.Tenants`."""
        self._tokens[tenant.name] = self._tokens.get(tenant.name, 0) + tokens
        if tenant is not NOBODY:
            self._page.used(tenant.name, self._quota(tenant), tokens, now)

    def leave(self, tenant: TenantSpec) -> None:
        """See `parts.Tenants`."""
        self._in_progress[tenant.name] = max(0, self._in_progress.get(tenant.name, 0) - 1)
        if tenant is not NOBODY:
            self._page.leave(tenant.name)

    def salt(self, tenant: TenantSpec, salt: str) -> str:
        """See `parts.Tenants`. Without tenants a client's salt stays as it is; with tenants it is a keyed digest of
        tenant and salt, so that nobody can name another's."""
        if not self._tenants and tenant.name == "":
            return salt
        name = tenant.name.encode()
        text = len(name).to_bytes(4, "little") + name + salt.encode(errors="surrogatepass")
        return hashlib.blake2b(text, digest_size=32, key=self._secret, person=b"headwater salt").hexdigest()

    def state(self) -> dict[str, Any]:
        """For `headwater fleet`: by tenant what is in progress, tokens, and how often each quota refused."""
        names = self._tenants or {"": NOBODY}
        return {
            "unknown_keys": self.unknown,
            "careless": self._page.careless,
            "rows": [
                {
                    "tenant": name,
                    "in_progress": self._in_progress.get(name, 0),
                    "spent_tokens": self._tokens.get(name, 0),
                    "refused": {reason: count for (who, reason), count in self._refused.items() if who == name},
                }
                for name in names
            ],
        }

    def _quota(self, tenant: TenantSpec) -> Quota:
        return self._quotas.get(tenant.name, UNLIMITED)


def _digests(tenants: Sequence[TenantSpec]) -> dict[bytes, tuple[bytes, TenantSpec]]:
    """Whose each key is; raises ConfigError, which repeats nothing that stands where a digest should."""
    found: dict[bytes, tuple[bytes, TenantSpec]] = {}
    names: set[str] = set()
    for tenant in tenants:
        if not tenant.name or tenant.name in names:
            raise ConfigError(f"tenants: {tenant.name!r} twice or without a name; each needs a name of its own")
        names.add(tenant.name)
        for place, row in enumerate(tenant.keys):
            match = _ROW.fullmatch(row)
            where = f"tenants.{tenant.name}.keys[{place}]"
            if match is None:
                raise ConfigError(f"{where}: not sha256:HEX; `headwater conductor key` prints a key and its line")
            digest = bytes.fromhex(match[1])
            if digest in found:
                raise ConfigError(f"{where}: {found[digest][1].name} has this key already; make one for each tenant")
            found[digest] = (digest, tenant)
    return found


def _quota_of(tenant: TenantSpec) -> Quota:
    quota = Quota(tenant.concurrency, tenant.requests_per_minute, tenant.tokens_per_minute)
    return UNLIMITED if quota == UNLIMITED else quota


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
