"""Which servers a stack has to bring along, and how each is prepared once it has a port.

The stack treats all alike: pick a port, prepare, start, supervise. What differs is said here. A
server that the user gave by URL is not in the list.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from dsec.platform.nats_users import users
from dsec.platform.roles import CLIENT, OPERATOR, role_of_service
from dsec.platform.stack.errors import StackError
from dsec.platform.stack.nats_server import NATS_SERVER, NatsServerOptions, nats_server_process
from dsec.platform.stack.options import StackOptions
from dsec.platform.stack.postgres import POSTGRES, PostgresOptions, prepare_postgres
from dsec.platform.stack.process import ProcessSpec
from dsec.platform.stack.state import StateDir
from dsec.platform.stack.timescale import timescale_programs


@dataclass(frozen=True)
class PreparedServer:
    """How to run a server, and the URL it is reached at once it is ready.

    `user_urls`: for the users of a server that has several, by user.
    """

    spec: ProcessSpec
    url: str
    user_urls: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EmbeddedServer:
    """A server that is ours to run. `given_port`: the user insists on it."""

    name: str
    given_port: int | None
    prepare: Callable[[int], Awaitable[PreparedServer]]


def embedded_servers(
    options: StackOptions, state: StateDir, on_progress: Callable[[str], None]
) -> tuple[EmbeddedServer, ...]:
    """The servers that were not given by URL, in the order they are started.

    Raises:
        StackError: what was asked for does not fit together, or does not fit what is there.
    """
    passwords = state.nats_passwords(users())
    with_timescale = _with_timescale(options, state)

    async def nats(port: int) -> PreparedServer:
        server = NatsServerOptions(
            directory=state.path / "nats",
            log_path=state.log_path(NATS_SERVER),
            port=port,
            password=passwords[OPERATOR],
            user_passwords={user: passwords[user] for user in passwords if user != OPERATOR},
            sync_interval=options.sync_interval,
        )
        urls = {user: server.url_of(user) for user in passwords}
        client = urls[role_of_service(CLIENT).user]
        return PreparedServer(nats_server_process(server), client, urls)

    async def postgres(port: int) -> PreparedServer:
        server = PostgresOptions(
            directory=state.timescale_dir if with_timescale else state.postgres_dir,
            log_path=state.log_path(POSTGRES),
            port=port,
            password=state.password(),
        )
        programs = None
        if with_timescale:
            log_path = state.log_path("timescaledb")
            programs = await timescale_programs(server.directory, log_path, on_progress)
        return PreparedServer(await prepare_postgres(server, programs), server.url)

    servers = []
    if options.nats_url is None:
        servers.append(EmbeddedServer(NATS_SERVER, options.nats_port, nats))
    if options.database_url is None:
        servers.append(EmbeddedServer(POSTGRES, options.postgres_port, postgres))
    return tuple(servers)


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
