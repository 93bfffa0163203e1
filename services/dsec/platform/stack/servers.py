"""Which servers a stack has to bring along, and how each is prepared once it has a port.

The stack treats all alike: pick a port, prepare, start, supervise. What differs is said here. A
server that the user gave by URL is not in the list.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from dsec.platform.nats_users import users
from dsec.platform.roles import CLIENT, OPERATOR, role_of_service
from dsec.platform.stack.database_roles import CLIENT as CLIENT_ROLE
from dsec.platform.stack.database_roles import DATABASE_ROLES
from dsec.platform.stack.errors import StackError
from dsec.platform.stack.nats_server import (
    NATS_SERVER,
    ClusterOptions,
    NatsServerOptions,
    nats_server_process,
)
from dsec.platform.stack.options import StackOptions
from dsec.platform.stack.ports import free_port
from dsec.platform.stack.postgres import POSTGRES, PostgresOptions, let_roles_in, prepare_postgres
from dsec.platform.stack.process import ProcessSpec
from dsec.platform.stack.state import NATS_DIRECTORY, StateDir
from dsec.platform.stack.timescale import timescale_programs

ROUTE_PASSWORD_BYTES = 24


@dataclass(frozen=True)
class PreparedServer:
    """How to run a server, and the URL it is reached at once it is ready.

    `url` is a client's, `user_urls` those of all its users. `let_users_in`: what has to be done
    once what they use is there, and before any of them comes.
    """

    spec: ProcessSpec
    url: str
    user_urls: Mapping[str, str] = field(default_factory=dict)
    let_users_in: Callable[[], Awaitable[None]] | None = None


@dataclass(frozen=True)
class EmbeddedServer:
    """A server that is ours to run. `given_port`: the user insists on it."""

    name: str
    given_port: int | None
    prepare: Callable[[int], Awaitable[PreparedServer]]
    kind: str
    """What it is, of which there may be several: `nats-server`."""


def embedded_servers(
    options: StackOptions, state: StateDir, on_progress: Callable[[str], None]
) -> tuple[EmbeddedServer, ...]:
    """The servers that were not given by URL, in the order they are started.

    Raises:
        StackError: what was asked for does not fit together, or does not fit what is there.
    """
    with_timescale = _with_timescale(options, state)

    async def postgres(port: int) -> PreparedServer:
        server = PostgresOptions(
            directory=state.timescale_dir if with_timescale else state.postgres_dir,
            log_path=state.log_path(POSTGRES),
            port=port,
            password=state.password(),
            role_passwords=state.database_passwords(role.user for role in DATABASE_ROLES),
        )
        programs = None
        if with_timescale:
            log_path = state.log_path("timescaledb")
            programs = await timescale_programs(server.directory, log_path, on_progress)
        spec = await prepare_postgres(server, programs)
        urls = server.user_urls
        return PreparedServer(
            spec, urls[CLIENT_ROLE.user], urls, functools.partial(let_roles_in, server)
        )

    servers = []
    if options.nats_url is None:
        servers += _nats_servers(options, state)
    if options.database_url is None:
        servers.append(EmbeddedServer(POSTGRES, options.postgres_port, postgres, POSTGRES))
    return tuple(servers)


def _nats_servers(options: StackOptions, state: StateDir) -> list[EmbeddedServer]:
    """One, or the nodes of a cluster."""
    passwords = state.nats_passwords(users())
    if options.nats_nodes == 1:
        return [_nats_server(options, state, passwords, NATS_SERVER, None)]
    # Between the nodes alone, which are all configured anew at every start.
    ports = [free_port() for _ in range(options.nats_nodes)]
    password = secrets.token_urlsafe(ROUTE_PASSWORD_BYTES)
    return [
        _nats_server(
            options,
            state,
            passwords,
            f"{NATS_SERVER}-{number}",
            ClusterOptions(port, tuple(one for one in ports if one != port), password),
        )
        for number, port in enumerate(ports, 1)
    ]


def _nats_server(
    options: StackOptions,
    state: StateDir,
    passwords: Mapping[str, str],
    name: str,
    cluster: ClusterOptions | None,
) -> EmbeddedServer:
    async def prepare(port: int) -> PreparedServer:
        server = NatsServerOptions(
            directory=state.path / name.replace(NATS_SERVER, NATS_DIRECTORY),
            log_path=state.log_path(name),
            port=port,
            password=passwords[OPERATOR],
            user_passwords={user: passwords[user] for user in passwords if user != OPERATOR},
            sync_interval=options.sync_interval,
            cluster=cluster,
            process_name=name,
        )
        urls = {user: server.url_of(user) for user in passwords}
        client = urls[role_of_service(CLIENT).user]
        return PreparedServer(nats_server_process(server), client, urls)

    given_port = options.nats_port if cluster is None else None
    return EmbeddedServer(name, given_port, prepare, NATS_SERVER)


def _with_timescale(options: StackOptions, state: StateDir) -> bool:
    """Whether the database is one with TimescaleDB: asked for, or made so before."""
    if options.database_url is not None:
        if options.timescaledb:
            raise StackError(
                "--timescaledb starts a database, and --database-url names one that runs: give one "
                "of them. A server that has TimescaleDB is used with it."
            )
        return False
    if options.timescaledb and (state.postgres_dir / "data").exists():
        raise StackError(
            f"The log of {state.path} is in a plain PostgreSQL: leave out --timescaledb, or choose "
            "another state directory (DSEC_STATE_DIR) for a new log."
        )
    return options.timescaledb or (state.timescale_dir / "data").exists()
