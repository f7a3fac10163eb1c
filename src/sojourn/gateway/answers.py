"""What the gateway itself answers to a request that does not go out.

Guarantee: an answer names what decided, in a header and in the body, and the next step; it holds
nothing of the request but its host.
"""

from __future__ import annotations

import msgspec

from sojourn.gateway.rules import Verdict


class Refused(Exception):
    """A request does not go out. Becomes the answer to it."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        next_step: str,
        *,
        rule: str = "",
        retry_after: int | None = None,
    ) -> None:
        super().__init__(code)
        self.status, self.code, self.message = status, code, message
        self.next_step, self.rule, self.retry_after = next_step, rule, retry_after


_NEVER = "No policy can allow it: it is no address of the outside."
_NEXT_STEPS = {
    "special-address": _NEVER,
    "host-address": _NEVER,
    "local-name": _NEVER,
    "private-address": "A rule has to name its network, and the operator has to allow that"
    " (SOJOURN_EGRESS_PRIVATE).",
}


def denied(verdict: Verdict) -> Refused:
    """The policy does not allow it."""
    usual = "Allow it in the session's network policy, or use what the policy allows."
    return Refused(
        403,
        "network_denied",
        verdict.reason,
        _NEXT_STEPS.get(verdict.rule, usual),
        rule=verdict.rule,
    )


def unreached(reason: str) -> Refused:
    """There is no way there."""
    return Refused(502, "upstream_unreachable", reason, "Check the host, and try again.")


def malformed(reason: str, status: int = 400) -> Refused:
    """It is no request that has one meaning."""
    return Refused(status, "invalid_request", reason, "Send a plain HTTP/1.1 request.")


def render(refused: Refused, *, json: bool) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Headers and body."""
    if json:
        kind, body = (
            b"application/json",
            msgspec.json.encode(
                {
                    "code": refused.code,
                    "message": refused.message,
                    "rule": refused.rule,
                    "next_step": refused.next_step,
                }
            ),
        )
    else:
        kind = b"text/plain; charset=utf-8"
        rule = f" (rule: {refused.rule})" if refused.rule else ""
        body = f"{refused.code}: {refused.message}{rule}\n{refused.next_step}\n".encode()
    headers = [
        (b"content-type", kind),
        (b"content-length", str(len(body)).encode()),
        (b"x-sojourn-code", refused.code.encode()),
    ]
    if refused.rule:
        headers.append((b"x-sojourn-rule", _plain(refused.rule)))
    if refused.retry_after is not None:
        headers.append((b"retry-after", str(refused.retry_after).encode()))
    return headers, body


def _plain(text: str) -> bytes:
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text).strip().encode()
