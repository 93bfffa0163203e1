"""The embedded stack as one thing: servers first, then services; services are stopped first.

`dsec up` on a laptop must need nothing but this package: NATS and PostgreSQL are child processes
on loopback, the object store is a directory, and all data lies under one state directory. A
server that the user gives by URL is used as it is, neither started nor stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

from dsec.platform.roles import role_of_service
from dsec.platform.stack.database_roles import database_role_of
from dsec.platform.stack.errors import StackError
from dsec.platform.stack.identity import own_identity
from dsec.platform.stack.nats_server import NATS_SERVER
from dsec.platform.stack.options import StackOptions
from dsec.platform.stack.ports import bind_error, choose_port
from dsec.platform.stack.postgres import POSTGRES
from dsec.platform.stack.process import ProcessSpec
from dsec.platform.stack.servers import EmbeddedServer, embedded_servers
from dsec.platform.stack.state import Endpoints, ProcessRecord, StackRecord, StateDir
from dsec.platform.stack.supervisor import SupervisedProcess

SERVER_RESTARTS_MAX = 8
# A free port is picked before the server binds it, and somebody may come in between.
PORT_TRIES_MAX = 3
SERVICE_STOP_GRACE_S = 30.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stack:
    """Servers and services of one state directory, as an async context manager.

    Entering starts nothing; leaving stops everything that was started. SIGINT and SIGTERM are
    taken over while inside: they end `wait`, or a start that is under way.
    """

    def __init__(self, options: StackOptions, *, on_progress: Callable[[str], None]) -> None:
        self._options = options
        self._on_progress = on_progress
        self._state = StateDir(options.state_dir)
        self._record = StackRecord()
        self._locked = False
        self._servers: list[SupervisedProcess] = []
        self._services: dict[str, list[SupervisedProcess]] = {}
        self._nats_urls: dict[str, str] = {}
        self._database_urls: dict[str, str] = {}
        self._let_users_in: list[Callable[[], Awaitable[None]]] = []
        self._stop_requested = asyncio.Event()
        self._starting: asyncio.Task[object] | None = None

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for sig in STOP_SIGNALS:
            loop.add_signal_handler(sig, self._on_stop_signal)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self.stop()
        finally:
            loop = asyncio.get_running_loop()
            for sig in STOP_SIGNALS:
                loop.remove_signal_handler(sig)

    def _on_stop_signal(self) -> None:
        self._stop_requested.set()
        if self._starting is not None:
            self._starting.cancel()

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """A stop signal during a start ends it with a sentence, not with a stack trace."""
        task = asyncio.current_task()
        self._starting = task
        try:
            yield
        except asyncio.CancelledError:
            if task is None or not self._stop_requested.is_set():
                raise
            task.uncancel()
            raise StackError("The stack was asked to stop while it was starting.") from None
        finally:
            self._starting = None

    async def start_servers(self) -> Endpoints:
        """Start what was not given by URL; return where everything is reached."""
        self._state.open()
        self._locked = True
        try:
            with self._interruptible():
                return await self._start_servers()
        except BaseException:
            await self.stop()
            raise

    async def _start_servers(self) -> Endpoints:
        await self._take_over()
        options = self._options
        urls: dict[str, list[str]] = {}
        self._nats_urls.clear()
        self._database_urls.clear()
        self._let_users_in.clear()
        for server in embedded_servers(options, self._state, self._on_progress):
            urls.setdefault(server.kind, []).append(await self._start_server(server))
        endpoints = Endpoints(
            nats_url=options.nats_url or ",".join(urls[NATS_SERVER]),
            database_url=options.database_url or urls[POSTGRES][0],
            object_store_url=options.object_store_url or self._state.objects_dir.as_uri(),
        )
        self._record = self._record.model_copy(update={"endpoints": endpoints})
        self._write_record()
        return endpoints

    async def _take_over(self) -> None:
        """End what an earlier supervisor left, and write down that the directory is ours."""
        earlier, problem = self._state.read()
        if problem is not None:
            self._on_progress(f"{problem} Starting without it; the data are not touched.")
        for leftover in await self._state.end_leftovers(earlier):
            self._on_progress(f"Ended {leftover}, left by an earlier run.")
        own = own_identity()
        self._record = StackRecord(
            supervisor=ProcessRecord(
                name="supervisor",
                pid=own.pid,
                create_time=own.create_time,
                log_path="",
            ),
            ports=earlier.ports if earlier is not None else {},
        )
        self._write_record()

    async def _start_server(self, server: EmbeddedServer) -> str:
        """Start one server on a port it can have; return its URL."""
        name = server.name
        for tries_left in reversed(range(PORT_TRIES_MAX)):
            port = choose_port(
                name,
                given=server.given_port,
                remembered=self._record.ports.get(name),
                on_progress=self._on_progress,
            )
            prepared = await server.prepare(port)
            process = self._supervise(prepared.spec, SERVER_RESTARTS_MAX)
            self._servers.append(process)
            try:
                await process.start()
                break
            except StackError:
                if tries_left == 0 or bind_error(port) is None:
                    raise
                # Somebody took the port in the moment before the server did.
                self._servers.remove(process)
        self._record = self._record.model_copy(update={"ports": {**self._record.ports, name: port}})
        self._on_progress(f"{name} is ready on port {port}.")
        if prepared.let_users_in is not None:
            self._let_users_in.append(prepared.let_users_in)
        urls = self._database_urls if server.kind == POSTGRES else self._nats_urls
        for user, url in prepared.user_urls.items():
            urls[user] = f"{urls[user]},{url}" if user in urls else url
        return prepared.url

    def nats_url_of(self, user: str) -> str:
        """The URL by which a user reaches NATS; on a server that is not ours the one for all."""
        endpoints = self._record.endpoints
        if endpoints is None:
            raise StackError("The servers are not up: start them before the services.")
        return self._nats_urls.get(user, endpoints.nats_url)

    def database_url_of(self, user: str) -> str:
        """The URL by which a user reaches the database; on a server that is not ours the one for
        all."""
        endpoints = self._record.endpoints
        if endpoints is None:
            raise StackError("The servers are not up: start them before the services.")
        return self._database_urls.get(user, endpoints.database_url)

    def _supervise(self, spec: ProcessSpec, restarts_max: int | None) -> SupervisedProcess:
        return SupervisedProcess(
            spec,
            restarts_max=restarts_max,
            on_change=self._note_processes,
            on_progress=self._on_progress,
        )

    async def start_services(self, env: Mapping[str, str]) -> None:
        """Start the services, each told by `env` and three URLs where to find everything, on NATS
        as its own user and in the database with its role. The tables are there before."""
        endpoints = self._record.endpoints
        if endpoints is None:
            raise StackError("The servers are not up: start them before the services.")
        for let_users_in in self._let_users_in:
            await let_users_in()
        told = {
            **os.environ,
            **env,
            "DSEC_OBJECT_STORE_URL": endpoints.object_store_url,
        }
        with self._interruptible():
            for service in self._options.services:
                replicas = self._services.setdefault(service.name, [])
                urls = {
                    "DSEC_NATS_URL": self.nats_url_of(role_of_service(service.name).user),
                    "DSEC_DATABASE_URL": self.database_url_of(database_role_of(service.name).user),
                }
                for index in range(service.replicas):
                    name = service.name if service.replicas == 1 else f"{service.name}-{index}"
                    spec = ProcessSpec(
                        name=name,
                        argv=service.argv,
                        log_path=self._state.log_path(name),
                        env=told | urls,
                        stop_grace_s=SERVICE_STOP_GRACE_S,
                    )
                    replica = self._supervise(spec, restarts_max=None)
                    replicas.append(replica)
                    await replica.start()
        self._write_record()

    async def wait(self) -> None:
        """Until SIGINT or SIGTERM; StackError when a server cannot be kept running."""
        stop = asyncio.create_task(self._stop_requested.wait())
        watched = [process.watching for process in self._everything()]
        try:
            done, _ = await asyncio.wait({stop, *watched}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
        for watching in watched:
            if watching in done:
                watching.result()

    async def stop(self) -> None:
        """Stop services, turn by turn, then servers. Safe to repeat."""
        if not self._locked:
            return
        try:
            turns = {command.stop_turn for command in self._options.services}
            for turn in sorted(turns):
                await _stop_together(self._replicas(turn))
            await _stop_together(self._servers)
            # What could not be stopped stays written down, for the next start to end.
            left = tuple(entry for entry in self._record.processes if entry.identity.is_alive())
            self._record = StackRecord(processes=left, ports=self._record.ports)
            self._note(self._record)
        finally:
            self._services.clear()
            self._servers.clear()
            self._locked = False
            self._state.close()

    def _replicas(self, stop_turn: int) -> list[SupervisedProcess]:
        commands = [each for each in self._options.services if each.stop_turn == stop_turn]
        return [one for each in commands for one in self._services.get(each.name, ())]

    def _everything(self) -> list[SupervisedProcess]:
        return [*self._servers, *(one for some in self._services.values() for one in some)]

    def _write_record(self) -> None:
        self._record = self._record.model_copy(update={"processes": self._started()})
        self._state.write(self._record)

    def _note_processes(self) -> None:
        self._record = self._record.model_copy(update={"processes": self._started()})
        self._note(self._record)

    def _note(self, record: StackRecord) -> None:
        # A full disk must keep nobody from restarting or stopping what runs.
        try:
            self._state.write(record)
        except StackError as error:
            self._on_progress(str(error))

    def _started(self) -> tuple[ProcessRecord, ...]:
        return tuple(
            ProcessRecord(
                name=process.spec.name,
                pid=process.child.identity.pid,
                create_time=process.child.identity.create_time,
                log_path=str(process.spec.log_path),
                stop_signal=int(process.spec.stop_signal),
            )
            for process in self._everything()
            if process.child is not None
        )


async def _stop_together(processes: Sequence[SupervisedProcess]) -> None:
    # One that does not stop must not keep the others from being stopped.
    await asyncio.gather(*(process.stop() for process in processes), return_exceptions=True)
