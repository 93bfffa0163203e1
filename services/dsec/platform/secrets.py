"""Secrets: named in what users write, and values only in the environment of the one service that
needs them, as `DSEC_SECRET_<NAME>`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from dsec_contracts.service import SECRET_USE

SECRET_PREFIX = "DSEC_SECRET_"
HIDDEN = "***"


class SecretAbsent(LookupError):
    """The environment does not have a secret. Says how to give it."""


class HeaderUnfit(ValueError):
    """A header cannot be sent with its secrets in place. Its text does not hold them."""


def secrets_of(environment: Mapping[str, str], names: Iterable[str], whose: str) -> dict[str, str]:
    """The values of secrets.

    Args:
        whose: environment it is, for people.

    Raises:
        SecretAbsent: there is none of a name.
    """
    found: dict[str, str] = {}
    for name in names:
        value = environment.get(SECRET_PREFIX + name)
        if value is None:
            raise SecretAbsent(f"{whose} has no secret {name}: start it with {SECRET_PREFIX}{name}")
        found[name] = value
    return found


def all_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """All that an environment has, by name: for those who hide them."""
    return {
        name.removeprefix(SECRET_PREFIX): value
        for name, value in environment.items()
        if name.startswith(SECRET_PREFIX)
    }


def filled(text: str, secrets: Mapping[str, str]) -> str:
    """A text with each `${NAME}` replaced."""
    return SECRET_USE.sub(lambda use: secrets[use[1]], text)


def filled_headers(headers: Mapping[str, str], secrets: Mapping[str, str]) -> dict[str, str]:
    """Headers with their secrets in place.

    Raises:
        HeaderUnfit: one cannot be sent. A client would say so by telling all of it.
    """
    found = {name: filled(value, secrets) for name, value in headers.items()}
    for name, value in found.items():
        if not (name.isascii() and value.isascii() and (name + value).isprintable()):
            raise HeaderUnfit(
                f"header {name!r:.80} cannot be sent: it, or a secret in it, has a line break or "
                "what is not ASCII (a secret read from a file often ends with a line break)"
            )
    return found


def hidden(data: bytes, secrets: Mapping[str, str]) -> bytes:
    """Bytes without the secrets that stand in them: a server may say what it was told."""
    for form in _forms(secrets):
        data = data.replace(form.encode("utf-8", "surrogateescape"), HIDDEN.encode())
    return data


def hidden_text(text: str, secrets: Mapping[str, str]) -> str:
    """A text without the secrets that stand in it."""
    for form in _forms(secrets):
        text = text.replace(form, HIDDEN)
    return text


def hidden_value(value: Any, secrets: Mapping[str, str]) -> Any:
    """Plain values without the secrets that stand in their texts, names included."""
    if isinstance(value, str):
        return hidden_text(value, secrets)
    if isinstance(value, bytes):
        return hidden(value, secrets)
    if isinstance(value, dict):
        pairs = value.items()
        return {hidden_value(k, secrets): hidden_value(v, secrets) for k, v in pairs}
    if isinstance(value, (list, tuple)):
        return [hidden_value(one, secrets) for one in value]
    return value


def _forms(secrets: Mapping[str, str]) -> list[str]:
    """Secrets as they are, and as errors, JSON and URLs write them; the longest first."""
    found: set[str] = set()
    for secret in secrets.values():
        found |= {secret, secret.strip()}
        for one in (secret, secret.strip()):
            found |= {repr(one)[1:-1], json.dumps(one)[1:-1]}
            found.add(quote(one.encode("utf-8", "surrogateescape"), safe=""))
    return sorted(found - {""}, key=len, reverse=True)
