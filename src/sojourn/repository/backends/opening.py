"""From a URL to a backend.

Guarantee: what a URL or variable says wrongly is refused here, with its cure, before anything is
sent; no part of a URL is passed over, so none leads to another place than it names; no credential
stands in a URL, an error or what `url` shows.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, unquote_to_bytes, urlsplit

from sojourn.errors import InvalidRequest, StoreRefused
from sojourn.repository.backends.base import Backend
from sojourn.repository.backends.local import LocalBackend
from sojourn.repository.backends.object_keys import is_key

if TYPE_CHECKING:
    from obstore.store import ClientConfig

TIMEOUT = "SOJOURN_STORE_TIMEOUT"
PATIENCE = "SOJOURN_STORE_PATIENCE"
_TIMEOUT_SECONDS = 60.0
_PATIENCE_SECONDS = 120.0
_CONNECT_SECONDS = 5.0
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", re.ASCII)
_FORMS = "file:///DIR, a path, s3://BUCKET/PREFIX or memory:"


def open_backend(
    url: str, *, create: bool = True, options: Mapping[str, str] | None = None
) -> Backend:
    """The backend of a URL. `options` stand in for the process's environment where they name a
    variable (AWS_*, SOJOURN_STORE_TIMEOUT, SOJOURN_STORE_PATIENCE). With `create` a directory is
    made a store where it is none; otherwise nothing is made, and StoreUnreachable says so: what
    stands at the place of a file system that is not mounted must not become a store.

    Raises InvalidRequest, StoreUnreachable, StoreRefused.
    """
    settings = {**os.environ, **(options or {})}
    if not url:
        raise InvalidRequest(f"The object store's URL is empty; it is {_FORMS}.")
    if "\0" in url:
        raise InvalidRequest("The object store's URL has a zero byte.")
    if "://" not in url and not re.match(r"(memory|file|s3):", url, re.IGNORECASE):
        try:
            return LocalBackend(Path(url).expanduser(), create=create)
        except RuntimeError:
            raise InvalidRequest("The object store's path begins with no user's home.") from None
    if re.search(r"[\x00-\x1f\x7f]", url) or url != url.strip():
        # `urlsplit` leaves such characters out: the rest may well be another place.
        raise InvalidRequest("The object store's URL has control characters or spaces around it.")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise InvalidRequest(f"The object store's URL is none; it is {_FORMS}.") from None
    if "@" in parts.netloc or "?" in url or "#" in url:
        raise InvalidRequest(
            "The object store's URL holds more than a place: credentials and settings are given"
            " in variables (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL); ? and # in"
            " the name of a directory are %3F and %23."
        )
    if parts.scheme == "memory":
        if parts.netloc or parts.path:
            raise InvalidRequest("What is in memory has no name: memory:")
        return _open_memory()
    if parts.scheme == "file":
        if parts.netloc not in {"", "localhost"} or not parts.path.startswith("/"):
            raise InvalidRequest("A file URL names an absolute path on this host: file:///DIR.")
        # Names are bytes on a file system, and need not be UTF-8.
        path = os.fsdecode(unquote_to_bytes(os.fsencode(parts.path)))
        if "\0" in path:
            raise InvalidRequest("The object store's URL has a zero byte.")
        return LocalBackend(Path(path), create=create)
    if parts.scheme == "s3":
        return _open_s3(parts, settings)
    raise InvalidRequest(f"No object store is known by {parts.scheme}://; it is {_FORMS}.")


# obstore is loaded only where it is used: a directory, the usual store, does without, and its
# library is as large as all else that a check or restore has to load.


def _open_memory() -> Backend:
    from obstore.store import MemoryStore

    from sojourn.repository.backends.objects import ObjectBackend

    return ObjectBackend(MemoryStore(), "memory:", local_clock=True)


def _open_s3(parts: SplitResult, settings: Mapping[str, str]) -> Backend:
    from obstore.exceptions import BaseError
    from obstore.store import S3Store

    from sojourn.repository.backends.objects import ObjectBackend
    from sojourn.repository.backends.retrying import Patience

    bucket, prefix = parts.netloc, parts.path.strip("/")
    if not _BUCKET.fullmatch(bucket):
        raise InvalidRequest("The URL names no bucket: s3://BUCKET/PREFIX.")
    if prefix and not is_key(prefix):
        raise InvalidRequest("The prefix in the URL may have letters, digits and ._-/ only.")
    timeout = _seconds(settings, TIMEOUT, _TIMEOUT_SECONDS)
    patience = _seconds(settings, PATIENCE, _PATIENCE_SECONDS)
    config: dict[str, Any] = {"conditional_put": "etag"}
    for name, option in _OPTIONS:
        if settings.get(name):
            config.setdefault(option, settings[name])
    endpoint = config.get("endpoint", "")
    if endpoint:
        _check_endpoint(endpoint)
        config["aws_endpoint_url_s3"] = endpoint
        config.setdefault("virtual_hosted_style_request", "false")  # the bucket in the path
    config.setdefault("region", "us-east-1")
    client: ClientConfig = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": f"{int(min(_CONNECT_SECONDS, timeout) * 1000)}ms",
        "timeout": f"{int(timeout * 1000)}ms",
        "user_agent": "sojourn",
    }
    authority = settings.get("AWS_CA_BUNDLE")
    if authority:
        try:
            client["root_certificate"] = Path(authority).read_bytes()
        except OSError as error:
            raise StoreRefused(f"AWS_CA_BUNDLE cannot be read: {error.strerror}.") from None
    try:
        store = S3Store(
            bucket,
            prefix=prefix or None,
            client_options=client,
            retry_config={"max_retries": 0},
            **config,
        )
    except (BaseError, ValueError) as raised:
        kind = type(raised).__name__  # its text may repeat what was configured
    else:
        shown = f"s3://{bucket}/{prefix}" if prefix else f"s3://{bucket}"
        return ObjectBackend(store, shown, patience=Patience(patience))
    raise StoreRefused(f"The settings of the object store are not accepted ({kind}).")


# In the order of precedence. obstore itself reads further AWS_* variables of the environment
# (roles, web identities, containers' credentials).
_OPTIONS = (
    ("AWS_ACCESS_KEY_ID", "access_key_id"),
    ("AWS_SECRET_ACCESS_KEY", "secret_access_key"),
    ("AWS_SESSION_TOKEN", "session_token"),
    ("AWS_REGION", "region"),
    ("AWS_DEFAULT_REGION", "region"),
    ("AWS_ENDPOINT_URL_S3", "endpoint"),
    ("AWS_ENDPOINT_URL", "endpoint"),
    ("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "virtual_hosted_style_request"),
    ("AWS_SERVER_SIDE_ENCRYPTION", "server_side_encryption"),
    ("AWS_SSE_KMS_KEY_ID", "sse_kms_key_id"),
    ("AWS_DISABLE_BULK_DELETE", "disable_bulk_delete"),
)


def _check_endpoint(endpoint: str) -> None:
    try:
        parts = urlsplit(endpoint)
        good = parts.scheme in {"http", "https"} and parts.hostname and "@" not in parts.netloc
    except ValueError:
        good = False
    if not good:
        raise InvalidRequest(
            "AWS_ENDPOINT_URL must be http://HOST:PORT or https://HOST:PORT, without credentials."
        )


def _seconds(settings: Mapping[str, str], name: str, default: float) -> float:
    text = settings.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 86400:
        raise InvalidRequest(f"{name} must be a number of seconds, above 0.", variable=name)
    return value
