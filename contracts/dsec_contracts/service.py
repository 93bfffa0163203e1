"""`service.declared`: an outside service that reward functions may ask, and how it may be asked;
`service.mode_changed`: its rewards are deferred from now on, or no longer.

A service is declared once for the whole installation. Of several declarations of one name the one
at the highest position holds, for all replicas and all sessions.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from dsec_contracts.envelope import Event, Part
from dsec_contracts.keys import check_ordinal
from dsec_contracts.session import ShortText

SECRET_USE = re.compile(r"\$\{([^}]*)\}")
"""How a header names a secret."""
_SECRET_NAME = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
QPS_BUDGET_MIN = 0.1
"""Below one request in ten seconds a budget over ten seconds says nothing."""

ServiceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_\-]{1,64}$")]
HttpStatus = Annotated[int, Field(ge=400, le=599)]


class ServiceRetry(Part):
    """How often a call is tried, and how long it rests between attempts: a random time, whose
    bound doubles from `backoff_s_min` up to `backoff_s_max`."""

    attempts_max: Annotated[int, Field(ge=1, le=100)] = 5
    backoff_s_min: Annotated[float, Field(gt=0, le=600)] = 0.1
    backoff_s_max: Annotated[float, Field(gt=0, le=600)] = 5.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.backoff_s_min > self.backoff_s_max:
            raise ValueError("backoff_s_min is above backoff_s_max")
        return self


class ServiceBatch(Part):
    """Where a service takes several requests in one, and how many wait for each other.

    It gets `{"requests": [{"method", "path", "params", "json"}, ...]}` by POST and answers
    `{"responses": [{"status", "json"}, ...]}`, one for each, in their order.
    """

    path: Annotated[str, Field(pattern=r"^/[^?#]*$", max_length=1024)]
    size_max: Annotated[int, Field(ge=1, le=1024)] = 32
    wait_ms: Annotated[float, Field(ge=0, le=60_000)] = 20.0


class ServiceTerms(Part):
    """Where a service is, and what it is to be spared.

    `qps_budget` holds for all replicas and sessions together, every attempt counted;
    `concurrency_max` for each replica of the reward service. `deadline_s` is for one call: its
    attempts and the rests between them, not what it waits for the budget; `attempt_s_max` for one
    attempt (null: a third of it). `latency_switch_ms`: with a p95 above, rewards of sessions that
    can take it are deferred.
    """

    base_url: Annotated[str, Field(pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$", max_length=1024)]
    qps_budget: Annotated[float, Field(ge=QPS_BUDGET_MIN, le=1_000_000)]
    concurrency_max: Annotated[int, Field(ge=1, le=10_000)] = 16
    deadline_s: Annotated[float, Field(gt=0, le=86_400)] = 30.0
    attempt_s_max: Annotated[float, Field(gt=0, le=86_400)] | None = None
    retry: ServiceRetry = ServiceRetry()
    retryable_statuses: Annotated[list[HttpStatus], Field(max_length=64)] = Field(
        default_factory=lambda: [429, 502, 503, 504]
    )
    latency_switch_ms: Annotated[float, Field(gt=0, le=3_600_000)] = 200.0
    batch: ServiceBatch | None = None
    headers: Annotated[dict[ShortText, ShortText], Field(max_length=32)] = Field(
        default_factory=dict
    )
    """`${NAME}` in a value stands for a secret, whose value is in the environment of the reward
    service alone, as `DSEC_SECRET_<NAME>`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in self.secret_names():
            if not _SECRET_NAME.fullmatch(name):
                raise ValueError(f"headers: ${{{name}}} names no secret: capitals, digits and _")
        return self

    def secret_names(self) -> list[str]:
        """The secrets that its headers use."""
        found = (SECRET_USE.findall(value) for value in self.headers.values())
        return sorted({name for names in found for name in names})


class ServiceFact(ServiceTerms):
    """One declaration. `version` counts the declarations of one name, from 1."""

    name: ServiceName
    version: Annotated[int, Field(ge=1), AfterValidator(check_ordinal)]


class ServiceCircumstance(Part):
    """For people."""

    client: ShortText | None = None


class ServiceDeclared(Event):
    """An outside service was declared, or declared anew."""

    fact: ServiceFact
    circumstance: ServiceCircumstance = ServiceCircumstance()


class ServiceModeFact(Part):
    """`since_ms`: when it switched, Unix time; it tells the switches of a service apart."""

    name: ServiceName
    mode: Literal["synchronous", "deferred"]
    since_ms: Annotated[int, Field(ge=0, le=2**53)]


class ServiceModeCircumstance(Part):
    """What was seen. `p95_ms`: the worst that a replica reported; null: nothing was asked lately.
    `latency_switch_ms`: the limit above which its rewards are deferred."""

    replica: ShortText | None = None
    p95_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    latency_switch_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class ServiceModeChanged(Event):
    """Rewards that ask a service are deferred from now on, in sessions that take that; or are not
    any more. Of several replicas one says so."""

    fact: ServiceModeFact
    circumstance: ServiceModeCircumstance = ServiceModeCircumstance()
