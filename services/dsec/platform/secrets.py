"""Secrets: named in what users write, and values only in the environment of the one service that
needs them, as `DSEC_SECRET_<NAME>`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dsec_contracts.service import SECRET_USE

SECRET_PREFIX = "DSEC_SECRET_"
HIDDEN = b"***"


class SecretAbsent(LookupError):
    """The environment does not have a secret. Says how to give it."""


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


def filled(text: str, secrets: Mapping[str, str]) -> str:
    """A text with each `${NAME}` replaced."""
    return SECRET_USE.sub(lambda use: secrets[use[1]], text)


def hidden(data: bytes, secrets: Mapping[str, str]) -> bytes:
    """Bytes without the secrets that stand in them: a server may say what it was told."""
    for secret in sorted(filter(None, secrets.values()), key=len, reverse=True):
        data = data.replace(secret.encode(), HIDDEN)
    return data
