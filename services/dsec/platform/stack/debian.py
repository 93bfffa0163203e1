"""Packages of Debian and Ubuntu, unpacked into a folder of ours. Nothing on the system changes.

apt-get is the client, with lists, cache and settings of its own, and its signatures count as
always. What it may not do is look at the packages that are installed: a library of this system
would be missing in the folder. So it is told that nothing is, except for a made-up package that
provides what a server never calls.
"""

from __future__ import annotations

import asyncio
import os
import platform
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dsec.platform.stack.errors import StackError, os_failure
from dsec.platform.stack.files import write_private
from dsec.platform.stack.process import ProcessSpec, run_to_end

APT_WITHIN_S = 900.0
APT_TIMEOUT_S = 20
APT_RETRIES_MAX = 2
SUITES = {"debian": ("trixie", "main"), "ubuntu": ("resolute", "main universe")}
"""The release that packages are taken from, and its components; the first ones with TimescaleDB
that are supported for years. Packages bring every library along, so the system may be older."""
TOOLS = ("apt-get", "apt-cache", "apt-config", "dpkg", "dpkg-deb")

UNNEEDED = (
    "adduser",
    "debconf",
    "libjson-perl",
    "locales",
    "locales-all",
    "netbase",
    "passwd",
    "perl",
    "perl-base",
    "postgresql-client-common",
    "postgresql-common",
    "procps",
    "readline-common",
    "sensible-utils",
    "ssl-cert",
    "sysvinit-utils",
    "ucf",
    *(f"libllvm{major}" for major in range(14, 30)),
    *(f"libllvm{major}t64" for major in range(14, 30)),
)
"""What packages of servers ask for and a server does not: configuration, accounts, perl, and the
compiler behind `jit`, which is three times as large as all the rest."""

_TOP_FOLDERS = frozenset({"bin", "sbin", "lib", "lib64", "lib32", "libx32"})
_LEFT_OUT = re.compile(
    r"usr/share/(doc|doc-base|man|info|locale|lintian|bug)(/|$)|usr/lib/postgresql/\d+/lib/bitcode"
)


@dataclass(frozen=True)
class Distribution:
    """One whose packages are used: `suite` is the release they are taken from."""

    name: str
    codename: str
    suite: str
    components: str
    keyring: Path


def this_distribution(instead: str) -> Distribution:
    """The distribution of this machine; StackError, with what to do `instead`, on any other."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    try:
        told = platform.freedesktop_os_release()
    except OSError:
        told = {}
    name, codename = told.get("ID", ""), told.get("VERSION_CODENAME", "")
    keyring = Path(f"/usr/share/keyrings/{name}-archive-keyring.gpg")
    if name not in SUITES:
        shown = told.get("PRETTY_NAME", platform.system())
        raise StackError(
            f"Packages are taken from Debian or Ubuntu, and this is {shown}: {instead}."
        )
    if missing:
        raise StackError(f"{missing[0]} is not on the PATH of this {name}: {instead}.")
    if not keyring.is_file():
        raise StackError(
            f"The keyring {keyring} is missing: install {name}-archive-keyring, or {instead}."
        )
    suite, components = SUITES[name]
    return Distribution(name, codename, suite, components, keyring)


class PackageFetcher:
    """Fetches packages into `folder`, its own alone, and unpacks them. `log_path`: apt's words."""

    def __init__(self, folder: Path, log_path: Path, distribution: Distribution) -> None:
        self._folder = folder
        self._log_path = log_path
        self._distribution = distribution
        self._env = {**os.environ, "APT_CONFIG": str(folder / "apt.conf"), "LC_ALL": "C.UTF-8"}

    async def update(self) -> None:
        """Read the lists of packages; StackError when no mirror can be reached."""
        # Asked before our own settings are there: these are about the system's mirrors.
        sources = await self._sources()
        acquire = await _output("apt-config", "dump", env=os.environ)
        architecture = (await _output("dpkg", "--print-architecture", env=os.environ)).strip()
        try:
            shutil.rmtree(self._folder, ignore_errors=True)
            for name in ("lists/partial", "cache/archives/partial"):
                (self._folder / name).mkdir(parents=True)
        except OSError as error:
            raise os_failure(self._folder, "preparing to fetch packages", error) from error
        write_private(self._folder / "sources.list", sources)
        write_private(self._folder / "status", _status(architecture))
        write_private(self._folder / "apt.conf", self._configuration(acquire))
        await self._run("apt-get", "--quiet", "update")

    async def names(self, prefix: str) -> Sequence[str]:
        """The names of the packages that begin with `prefix`."""
        return (await _output("apt-cache", "pkgnames", prefix, env=self._env)).split()

    async def download(self, *names: str) -> None:
        """Fetch packages and all that they need."""
        flags = ("--quiet", "--yes", "--download-only", "--no-install-recommends")
        await self._run("apt-get", *flags, "install", *names)

    async def unpack(self, root: Path) -> None:
        """Unpack everything that was fetched under `root`/usr."""
        packages = sorted((self._folder / "cache" / "archives").glob("*.deb"))
        for package in packages:
            try:
                await asyncio.to_thread(_unpack, package, root)
            except (OSError, tarfile.TarError) as error:
                failure = error if isinstance(error, OSError) else OSError(str(error))
                raise os_failure(root, f"unpacking {package.name}", failure) from error

    def remove(self) -> None:
        """Remove lists, cache and packages."""
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _run(self, *argv: str) -> None:
        await run_to_end(
            ProcessSpec(name=argv[0], argv=argv, log_path=self._log_path, env=self._env),
            APT_WITHIN_S,
        )

    async def _sources(self) -> str:
        """Lines of sources.list: the mirrors that this machine is set to use."""
        told = await _output(
            "apt-get",
            "indextargets",
            "--no-release-info",  # lists that were never read count too
            "--format",
            "$(REPO_URI) $(RELEASE) $(COMPONENT)",
            "Created-By: Packages",
            env=os.environ,
        )
        of = self._distribution
        mirrors = mirrors_of(told, of)
        if not mirrors:
            raise StackError(
                f"apt-get knows no mirror of {of.name} {of.codename}: look into /etc/apt."
            )
        return "".join(
            f"deb [signed-by={of.keyring}] {uri} {suite} {of.components}\n"
            for suite, uri in mirrors.items()
        )

    def _configuration(self, system: str) -> str:
        # Proxies and the like stay; hooks do not, one of which empties the system's cache in
        # many container images.
        kept = [line for line in system.splitlines() if line.startswith("Acquire::")]
        ours: Mapping[str, object] = {
            "Dir::Etc::main": "/dev/null",
            "Dir::Etc::parts": "/dev/null",
            "Dir::Etc::sourcelist": self._folder / "sources.list",
            "Dir::Etc::sourceparts": "/dev/null",
            "Dir::Etc::preferences": "/dev/null",
            "Dir::Etc::preferencesparts": "/dev/null",
            "Dir::State": self._folder,
            "Dir::State::lists": self._folder / "lists",
            "Dir::State::status": self._folder / "status",
            "Dir::Cache": self._folder / "cache",
            "APT::Sandbox::User": "",
            "APT::Update::Error-Mode": "any",
            "Acquire::Languages": "none",
            "Acquire::Retries": APT_RETRIES_MAX,
            "Acquire::http::Timeout": APT_TIMEOUT_S,
            "Acquire::https::Timeout": APT_TIMEOUT_S,
        }
        return "\n".join([*kept, *(f'{name} "{value}";' for name, value in ours.items()), ""])


def mirrors_of(index_targets: str, distribution: Distribution) -> Mapping[str, str]:
    """The mirror of each suite, from apt-get's lines of a repository, release and component."""
    found: dict[str, str] = {}
    name, codename = distribution.name, distribution.codename
    # Other people's repositories use the same names of releases, but not of the last component.
    marker = distribution.components.split()[-1]
    for line in index_targets.splitlines():
        uri, release, component = line.split(" ", 2)
        pocket = release.removeprefix(codename)
        ours = f"/{name}" in uri and component == marker and release.startswith(codename)
        if ours and pocket in ("", "-updates", "-security"):
            found.setdefault(distribution.suite + pocket, uri)
    return found


def _status(architecture: str) -> str:
    provides = ", ".join(f"{name} (= 999:0)" for name in UNNEEDED)
    return f"""\
Package: unneeded-by-servers
Status: install ok installed
Architecture: {architecture}
Multi-Arch: foreign
Version: 1
Maintainer: nobody <nobody@localhost>
Description: what a server does not need
Provides: {provides}
"""


def _unpack(package: Path, root: Path) -> None:
    with (
        subprocess.Popen(
            ["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE
        ) as unpacker,
        tarfile.open(fileobj=unpacker.stdout, mode="r|") as archive,
    ):
        for member in _kept(archive):
            archive.extract(member, root, set_attrs=False)
            if member.isfile():
                (root / member.name).chmod(member.mode & 0o755 | 0o644)
    if unpacker.returncode != 0:
        raise OSError(f"dpkg-deb exited with status {unpacker.returncode}")


def _kept(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Files and links under /usr, where older packages still have /bin and /lib beside it."""
    for member in archive:
        member.name = _below_usr(member.name)
        if member.islnk():
            member.linkname = _below_usr(member.linkname)
        inside = member.name.startswith("usr/") and ".." not in PurePosixPath(member.name).parts
        kind = member.isfile() or member.issym() or member.islnk()
        if inside and kind and not _LEFT_OUT.match(member.name):
            yield member


def _below_usr(name: str) -> str:
    path = PurePosixPath("/", name).relative_to("/")
    return str(
        PurePosixPath("usr", path) if path.parts[:1] and path.parts[0] in _TOP_FOLDERS else path
    )


async def _output(*argv: str, env: Mapping[str, str]) -> str:
    """What a short program says; StackError when it fails."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        env=dict(env),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    told, complaint = await process.communicate()
    if process.returncode != 0:
        said = complaint.decode(errors="replace").strip().splitlines()[-1:]
        raise StackError(f"{' '.join(argv[:2])} failed ({' '.join(said)}): look into /etc/apt.")
    return told.decode(errors="replace")
