"""What an attempt at a service is made with, whatever is declared while it is under way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from yarl import URL

from dsec.platform.secrets import SecretAbsent, filled_headers, secrets_of
from dsec.reward.http_exchange import ServiceFailed
from dsec_contracts.service import ServiceFact


class Terms(NamedTuple):
    """A declaration, with the secrets that it names."""

    fact: ServiceFact
    secrets: Mapping[str, str]
    headers: Mapping[str, str]

    @classmethod
    def of(cls, fact: ServiceFact, environment: Mapping[str, str]) -> Terms:
        """The terms of a declaration.

        Raises:
            ServiceFailed: `secret_absent`, `service_invalid`: nothing can be sent like that.
        """
        try:
            secrets = secrets_of(environment, fact.secret_names(), "the reward service")
            URL(fact.base_url)
            return cls(fact, secrets, filled_headers(fact.headers, secrets))
        except SecretAbsent as error:
            raise ServiceFailed("secret_absent", f"{fact.name}: {error}") from error
        except ValueError as error:
            raise ServiceFailed("service_invalid", f"{fact.name}: {error}") from error
