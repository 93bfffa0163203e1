"""All checks, in the order in which they are told."""

from __future__ import annotations

from dsec.doctor import baseline as baselines
from dsec.doctor import binaries, bus, clock, database, gpu, machine, namespaces, place, store
from dsec.doctor.finding import Check
from dsec.doctor.servers import Asked, Servers


def all_checks(servers: Servers) -> list[Check]:
    """What is asked of this machine and of its servers."""
    asked = Asked.of(servers)
    state_dir = servers.state_dir
    database_is_given = servers.database_url is not None
    return [
        Check("kernel", machine.kernel),
        Check("python", machine.python),
        Check("packages", machine.packages),
        Check("memory", machine.memory),
        Check("limits", machine.limits),
        Check("disk", lambda: place.disk(state_dir)),
        Check("ports", lambda: place.ports(state_dir)),
        Check("namespaces", lambda: namespaces.namespaces(database_is_given)),
        Check("clock", clock.synchronised),
        Check("nats_binary", binaries.nats_binary),
        Check("postgres_binary", binaries.postgres_program),
        Check("nats", lambda: bus.server(asked)),
        Check("nats_stream", lambda: bus.stream(asked)),
        Check("nats_sync", lambda: bus.sync(asked)),
        Check("nats_clock", lambda: bus.clock(asked)),
        Check("database", lambda: database.server(asked)),
        Check("database_durability", lambda: database.durability(asked)),
        Check("timescaledb", lambda: database.timescaledb(asked)),
        Check("database_clock", lambda: database.clock(asked)),
        Check("object_store", lambda: store.object_store(servers.object_store_url, state_dir)),
        Check("gpu", gpu.gpu, gpu.DEADLINE_S),
        Check("determinism", baselines.baseline, baselines.DEADLINE_S),
    ]
