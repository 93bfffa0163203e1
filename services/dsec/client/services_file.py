"""services.yaml: the outside services of an installation, declared once for all its sessions.

A mapping of names to terms. What is declared before and not in the file stays as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from yarl import URL

from dsec.client.publishing import SOURCE
from dsec.client.sealing import SealedSpec
from dsec.client.yaml_file import SpecFileError, read_documents
from dsec.platform.bus import Bus
from dsec.platform.clock import utc_now
from dsec.platform.log import LogReader
from dsec.platform.secrets import filled_headers
from dsec.reward.declarations import newest
from dsec_contracts import ServiceDeclared, canonical
from dsec_contracts.service import (
    ServiceBatch,
    ServiceCircumstance,
    ServiceFact,
    ServiceName,
    ServiceRetry,
    ServiceTerms,
)

LOG_WAIT_S = 30.0
RACES_MAX = 5
"""Others who declare the same service at the same time."""


class _Retry(ServiceRetry):
    model_config = ConfigDict(extra="forbid")


class _Batch(ServiceBatch):
    model_config = ConfigDict(extra="forbid")


class ServiceDocument(ServiceTerms):
    """The terms of one service as users write them: no unknown key."""

    model_config = ConfigDict(extra="forbid")

    retry: _Retry = _Retry()
    batch: _Batch | None = None


_NAME: TypeAdapter[str] = TypeAdapter(ServiceName)
_KNOWN = {
    "": ServiceDocument.model_fields,
    "retry": ServiceRetry.model_fields,
    "batch": ServiceBatch.model_fields,
}


def read_services(path: Path) -> dict[str, ServiceDocument]:
    """The services of a file.

    Raises:
        SpecFileError: says which service and key, and what to do.
    """
    found: dict[str, ServiceDocument] = {}
    for document in read_documents(path):
        for name, terms in document.items():
            if name in found:
                raise SpecFileError(f"{path}: {name} is there twice")
            found[name] = _service(str(path), name, terms)
    return found


def _service(where: str, name: str, terms: Any) -> ServiceDocument:
    try:
        _NAME.validate_python(name)
    except ValidationError as error:
        raise SpecFileError(
            f"{where}: {name!r:.80} names no service: letters, digits, - and _, at most 64"
        ) from error
    if not isinstance(terms, Mapping):
        raise SpecFileError(f"{where}: {name}: write its terms below it, base_url and qps_budget")
    try:
        found = ServiceDocument.model_validate(terms)
    except ValidationError as error:
        told = [_told(name, item) for item in error.errors(include_url=False)]
        raise SpecFileError(f"{where}: {'; '.join(told)}") from error
    try:
        _ = URL(found.base_url).port
        filled_headers(found.headers, dict.fromkeys(found.secret_names(), ""))
    except ValueError as error:
        raise SpecFileError(f"{where}: {name} cannot be asked: {error}") from error
    return found


def _told(name: str, item: Any) -> str:
    place = [str(part) for part in item["loc"]]
    key = ".".join([name, *place])
    if item["type"] == "missing":
        return f"{key} is missing: add it"
    if item["type"] == "extra_forbidden":
        known = ", ".join(_KNOWN.get(".".join(place[:-1]), ()))
        return f"{key} is no known key; known keys are {known}"
    return f"{key}: {item['msg'].removeprefix('Value error, ')}"


async def declare(
    bus: Bus, log: LogReader, name: str, terms: ServiceTerms, client: str
) -> tuple[int, bool]:
    """Declare a service. Returns the version that holds, and whether it is a new one.

    Raises:
        SpecFileError: others declare it again and again at the same time.
        LogBehind, LogUnavailable: nobody can say what is declared.
    """
    for _ in range(RACES_MAX):
        known = newest(await log.service_declarations()).get(name)
        if known is not None and _same(known, terms):
            return known.version, False
        version = 1 if known is None else known.version + 1
        fact = ServiceFact.model_validate({**terms.model_dump(), "name": name, "version": version})
        sequence = await _publish(bus, fact, client)
        # Of two declarations of one version the first is logged: only the log says whose it is.
        await log.wait_floor(sequence, LOG_WAIT_S)
        logged = newest(await log.service_declarations()).get(name)
        if logged is not None and logged.version == version and _same(logged, terms):
            return version, True
    raise SpecFileError(f"{name}: somebody else declares it at the same time: declare it again")


def asked_services(reward: SealedSpec | str) -> frozenset[str]:
    """The services that a session's reward function asks; none of one that is only named by its
    hash."""
    return frozenset(reward.document.services) if isinstance(reward, SealedSpec) else frozenset()


async def undeclared(log: LogReader, services: Set[str]) -> list[str]:
    """Those of some services that nobody has declared.

    Raises:
        LogUnavailable: nobody can say what is declared.
    """
    return sorted(services - newest(await log.service_declarations()).keys())


async def _publish(bus: Bus, fact: ServiceFact, client: str) -> int:
    event = ServiceDeclared(fact=fact, circumstance=ServiceCircumstance(client=client))
    digest = hashlib.sha256(canonical.encode(event.fact_value())).hexdigest()[:16]
    return await bus.publish(
        event,
        fact.name,
        source=SOURCE,
        time=utc_now(),
        event_id=f"service.{fact.name}.{fact.version}.{digest}",
    )


def _same(known: ServiceFact, terms: ServiceTerms) -> bool:
    names = ServiceTerms.model_fields.keys()
    return known.model_dump(include=set(names)) == terms.model_dump(include=set(names))
