"""Logins to registries, as `docker login` keeps them.

Guarantee: a login is given for the host it was kept under and no other; it is shown nowhere.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import subprocess
from pathlib import Path

import msgspec

from sojourn.errors import InvalidRequest

_HELPER = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HELPER_SECONDS = 30.0
_TOKEN_USER = "<token>"  # how helpers say that the secret is a token


class Login(msgspec.Struct, frozen=True):
    """A user's name and password, or a token alone."""

    username: str
    password: str
    token: str = ""

    def basic(self) -> str:
        """The value of a Basic authorization."""
        return base64.b64encode(f"{self.username}:{self.password}".encode()).decode()

    def __repr__(self) -> str:
        return "Login(...)"


class _Entry(msgspec.Struct, frozen=True, rename={"identity_token": "identitytoken"}):
    auth: str = ""
    username: str = ""
    password: str = ""
    identity_token: str = ""


class _Config(msgspec.Struct, frozen=True, rename="camel"):
    auths: dict[str, _Entry] = {}
    cred_helpers: dict[str, str] = {}
    creds_store: str = ""


class _Kept(msgspec.Struct, frozen=True, rename="pascal"):
    username: str
    secret: str


def config_path() -> Path:
    """The configuration of `docker login`."""
    given = os.environ.get("DOCKER_CONFIG")
    return (Path(given) if given else Path.home() / ".docker") / "config.json"


def find_login(host: str) -> Login | None:
    """The login for a registry; None: there is none. Raises InvalidRequest where the configuration
    cannot be read."""
    path = config_path()
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_Config)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is malformed"
        raise InvalidRequest(f"{path} cannot be read: {reason}", field="source") from None
    helper = config.cred_helpers.get(host) or config.creds_store
    if helper:
        found = _ask(helper, host)
        if found is not None:
            return found
    for name in (host, f"https://{host}", f"https://{host}/", f"https://{host}/v2/"):
        entry = config.auths.get(name)
        if entry is not None:
            return _login(entry, path)
    return None


def _login(entry: _Entry, path: Path) -> Login | None:
    if entry.identity_token:
        return Login("", "", entry.identity_token)
    if not entry.auth:
        return Login(entry.username, entry.password) if entry.username else None
    try:
        text = base64.b64decode(entry.auth, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise InvalidRequest(f"a login in {path} is malformed", field="source") from None
    username, _, password = text.partition(":")
    return Login(username, password.rstrip("\0"))


def _ask(helper: str, host: str) -> Login | None:
    """What one of Docker's credential helpers keeps."""
    if not _HELPER.fullmatch(helper):
        raise InvalidRequest(f"{helper[:64]!r} is no credential helper", field="source")
    try:
        done = subprocess.run(
            [f"docker-credential-{helper}", "get"],
            input=host.encode(),
            capture_output=True,
            timeout=_HELPER_SECONDS,
            check=False,
        )
        if done.returncode != 0:
            return None  # it keeps none for this host
        kept = msgspec.json.decode(done.stdout, type=_Kept)
    except (OSError, subprocess.TimeoutExpired, msgspec.MsgspecError) as error:
        raise InvalidRequest(
            f"docker-credential-{helper} does not work: {type(error).__name__}", field="source"
        ) from None
    if kept.username == _TOKEN_USER:
        return Login("", "", kept.secret)
    return Login(kept.username, kept.secret)
