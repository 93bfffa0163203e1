"""Whether telemetry is on, and where it goes: from `DSEC_OTLP_ENDPOINT` and OpenTelemetry's own
`OTEL_*` variables, which the SDK reads itself.

Telemetry must never keep a service from running: a setting that cannot be used is named in the log,
and the service goes on without.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping

from dsec.platform.settings import Settings
from dsec.platform.telemetry.sampler import Ratio
from dsec.platform.telemetry.telemetry import OFF, Telemetry

log = logging.getLogger(__name__)

HTTP, GRPC = "http/protobuf", "grpc"
_ENDPOINTS = tuple(f"OTEL_EXPORTER_OTLP{signal}_ENDPOINT" for signal in ("", "_TRACES", "_METRICS"))
_PROTOCOLS = tuple(f"OTEL_EXPORTER_OTLP{signal}_PROTOCOL" for signal in ("", "_TRACES", "_METRICS"))
_GRPC_EXPORTER = "opentelemetry.exporter.otlp.proto.grpc"
_SAMPLERS = ("always_on", "always_off", "traceidratio")


class Unusable(ValueError):
    """A setting that cannot be used, and what to do."""


def connect(settings: Settings, service: str, instance: str) -> Telemetry:
    """Telemetry as the settings say; off where they name no receiver or cannot be used.

    Args:
        service: `env-runtime`; spans and metrics come from `dsec-env-runtime`.
        instance: what tells this process from others of the service.
    """
    variables = settings.otel
    endpoints = [variables.get(name, "") for name in _ENDPOINTS] + [settings.otlp_endpoint]
    if not any(endpoints) or variables.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return OFF
    try:
        _check(endpoints, variables)
        ratio = sampler(variables)
        # Here and not above: the SDK takes a third of a second and 20 MB, used or not.
        from dsec.platform.telemetry.otlp import Otlp

        with _environment(variables):
            return Otlp(settings.otlp_endpoint, ratio, service, instance)
    except ValueError as error:
        log.error("telemetry is off: %s", error)
        return OFF


def _check(endpoints: list[str], variables: Mapping[str, str]) -> None:
    for endpoint in endpoints:
        if endpoint and not endpoint.startswith(("http://", "https://")):
            raise Unusable(
                f"{endpoint!r} is no URL of an OTLP receiver: write it as http://HOST:4318"
            )
    for name in _PROTOCOLS:
        if (protocol := variables.get(name) or HTTP) not in (HTTP, GRPC):
            raise Unusable(f"{name} is {protocol}, and {HTTP} and {GRPC} are what is spoken here")
        if protocol == GRPC and importlib.util.find_spec(_GRPC_EXPORTER) is None:
            raise Unusable(
                f"{name} is {GRPC}, which needs `pip install 'dsec[otlp-grpc]'`; or unset it, and "
                "name the receiver's HTTP port, usually 4318"
            )


def sampler(variables: Mapping[str, str]) -> Ratio:
    """What `OTEL_TRACES_SAMPLER` and `OTEL_TRACES_SAMPLER_ARG` ask for, by our own sampler.

    Raises:
        Unusable: they ask for what there is not.
    """
    name = variables.get("OTEL_TRACES_SAMPLER") or "always_on"
    kind = name.removeprefix("parentbased_")  # a session has no parent, so this changes nothing
    if kind not in _SAMPLERS:
        raise Unusable(f"OTEL_TRACES_SAMPLER is {name!r}: it may be {', '.join(_SAMPLERS)}")
    if kind != "traceidratio":
        return Ratio(1.0 if kind == "always_on" else 0.0)
    ratio = variables.get("OTEL_TRACES_SAMPLER_ARG") or "1.0"
    try:
        return Ratio(float(ratio))
    except ValueError:
        raise Unusable(
            f"OTEL_TRACES_SAMPLER_ARG is {ratio!r}: it is a ratio between 0 and 1"
        ) from None


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """The SDK reads its variables as it is made. A worker's do not come in its environment, where
    user code would see the receiver's credentials, and they are not left there either."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
