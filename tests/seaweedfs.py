"""A real S3 server for tests and measurements: SeaweedFS, one process on free ports of loopback."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dsec.platform.object_proof import ProofFailed, prove
from dsec.platform.object_s3 import KEY, SECRET, Bucket
from dsec.platform.objects import ObjectStoreError
from dsec.platform.stack.ports import free_port
from dsec.platform.stack.process import ProcessSpec

BUCKET = "anchors"
CREDENTIALS = {KEY: "for-tests-only", SECRET: "for-tests-only-too"}
SERVICES = ("master", "volume", "filer", "s3", "admin")
PORTS = (*SERVICES, *(f"{name}.grpc" for name in SERVICES))


@dataclass(frozen=True)
class Server:
    """Where a server listens, and what is put before blobs' names."""

    port: int
    prefix: str = "blobs"

    @property
    def endpoint(self) -> str:
        """The URL of the protocol."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """The object store, as DSec takes it."""
        return f"s3://{BUCKET}/{self.prefix}?endpoint={self.endpoint}"


def seaweedfs(folder: Path) -> tuple[Server, ProcessSpec]:
    """A server with its files in a folder. It is ready once it keeps what it promises, signed."""
    ports = {name: free_port() for name in PORTS}
    server = Server(ports["s3"])

    async def ready() -> bool:
        try:
            prove(Bucket(server.url, CREDENTIALS))
        except (ProofFailed, ObjectStoreError):
            return False
        return True

    flags = [
        f"-{name.replace('.grpc', '')}.port{'.grpc' * name.endswith('.grpc')}={port}"
        for name, port in ports.items()
    ]
    argv = (
        str(Path(sys.executable).parent / "weed"),
        "mini",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        *flags,
        "-webdav=false",
        "-admin.ui=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-bucket={BUCKET}",
    )
    return server, ProcessSpec(
        "seaweedfs", argv, folder / "weed.log", env={**os.environ, **CREDENTIALS}, ready=ready
    )


@contextlib.contextmanager
def in_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables of this process and of those that it starts."""
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
