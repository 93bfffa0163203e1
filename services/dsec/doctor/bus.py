"""A NATS server: its version and limits, its stream, how often it syncs, and its clock."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsec.doctor.binaries import NATS_MIN, version_in
from dsec.doctor.clock import Drift, drift_finding
from dsec.doctor.finding import Finding, Unseen
from dsec.doctor.hiding import Hidden, shown
from dsec.doctor.servers import MONITOR_VARIABLE, Asked
from dsec.platform.bus import BusUnavailable, StreamOptions
from dsec.platform.stack.nats_server import MAX_PAYLOAD_BYTES

MONITOR_WAIT_S = 5.0
MONITOR_BYTES_MAX = 1 << 20
SYNC_S_GOOD = 1.0
_NANOSECONDS = 1_000_000_000
_CONFIGURED_SYNC = re.compile(r'^\s*sync_interval:\s*"?([a-z0-9]+)"?', re.MULTILINE)
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def server(asked: Asked) -> Finding:
    """Whether it answers, is new enough, has JetStream on, and takes large enough messages."""
    url = asked.servers.nats_url
    if url is None:
        raise Unseen("No NATS server is given, and no stack runs here: `dsec up` starts one.")
    try:
        facts = asked.bus()
    except BusUnavailable as error:
        told = Hidden([url]).hide(str(error))
        return Finding(
            "fail",
            f"No NATS server that lets us in answers at {shown(url)} ({told}).",
            "Start it, or correct DSEC_NATS_URL: host, port, user and password.",
            {"url": shown(url)},
        )
    told = f"nats-server {facts.version} at {shown(url)}"
    seen = {
        "url": shown(url),
        "version": facts.version,
        "max_payload_bytes": facts.max_payload_bytes,
        "cluster_size": facts.cluster_size,
        "jetstream": not facts.jetstream,
    }
    if version_in(facts.version) < NATS_MIN:
        return Finding(
            "fail",
            f"{told} is too old: it cannot fence workers.",
            f"Upgrade it to {'.'.join(map(str, NATS_MIN))} or newer.",
            seen,
        )
    if facts.jetstream:
        return Finding(
            "fail",
            f"{told} has no JetStream for this user ({facts.jetstream}).",
            "Start it with `-js`, and enable JetStream for the account.",
            seen,
        )
    if facts.max_payload_bytes < MAX_PAYLOAD_BYTES:
        return Finding(
            "warn",
            f"{told} takes messages of {facts.max_payload_bytes} bytes at most.",
            f"Set max_payload to {MAX_PAYLOAD_BYTES} or more: a tick of many sessions is one "
            "message.",
            seen,
        )
    return Finding("ok", f"{told}, JetStream is on.", "", seen)


def stream(asked: Asked) -> Finding:
    """Whether the stream is as the services would make it."""
    facts = asked.seen_bus()
    if facts.jetstream:
        raise Unseen("Not examined: there is no JetStream.")
    if facts.stream is None:
        return Finding("absent", "There is no stream yet: the first service that starts makes it.")
    config = facts.stream
    other = {
        name: {"wanted": wanted, "found": config.get(name)}
        for name, wanted in StreamOptions().required().items()
        if config.get(name) != wanted
    }
    seen = {"replicas": config.get("num_replicas"), "max_bytes": config.get("max_bytes")}
    if other:
        listed = ", ".join(f"{name} {pair['found']}" for name, pair in other.items())
        return Finding(
            "fail",
            f"The stream is not as DSec makes it: {listed}.",
            "Start a service, which mends what can be changed; what is then left was set by "
            "somebody else: undo it.",
            {**seen, "different": other},
        )
    if facts.cluster_size > 1 and config.get("num_replicas") == 1:
        return Finding(
            "warn",
            f"The stream is kept once on a cluster of {facts.cluster_size}.",
            "Set DSEC_NATS_REPLICAS=3 for the recorder, or the loss of one node stops everything.",
            seen,
        )
    return Finding("ok", "The stream is as DSec makes it.", "", seen)


def sync(asked: Asked) -> Finding:
    """How often the server writes its stream to the disk, where that can be seen."""
    if asked.servers.nats_url is None:
        raise Unseen("No NATS server is given, and no stack runs here.")
    if asked.servers.nats_is_embedded:
        interval_s = configured_sync_s(asked.servers.state_dir)
    elif asked.servers.nats_monitor_url:
        try:
            interval_s = _monitored_sync_s(asked.servers.nats_monitor_url)
        except (OSError, ValueError, KeyError) as error:
            told = Hidden(asked.servers.urls()).hide(str(error))
            return Finding(
                "fail",
                f"{shown(asked.servers.nats_monitor_url)} does not say how the server syncs "
                f"({told}).",
                f"Correct {MONITOR_VARIABLE}: it is the server's monitoring port.",
            )
    else:
        return Finding(
            "absent",
            "How often the server syncs its stream cannot be seen by a client.",
            f"Set {MONITOR_VARIABLE} to its monitoring port, such as http://host:8222.",
        )
    if interval_s is None:
        raise Unseen("The configuration of the embedded server does not say how it syncs.")
    seen = {"sync_interval_s": interval_s}
    if interval_s > SYNC_S_GOOD:
        return Finding(
            "warn",
            f"The server syncs every {interval_s:g} s: a power failure loses as much, of what "
            "the log does not have yet.",
            "Set `sync_interval: 1s` (or `always`) in its jetstream block, or run three replicas.",
            seen,
        )
    told = f"every {interval_s:g} s" if interval_s else "every message"
    return Finding("ok", f"The server syncs {told}.", "", seen)


def configured_sync_s(state_dir: Path) -> float | None:
    """What the embedded server's configuration says, in seconds; 0 for `always`."""
    try:
        text = (state_dir / "nats" / "nats-server.conf").read_text()
    except OSError:
        return None
    found = _CONFIGURED_SYNC.search(text)
    if found is None:
        return None
    if found[1] == "always":
        return 0.0
    number, unit = re.fullmatch(r"(\d+)([a-z]+)", found[1]).groups()  # type: ignore[union-attr]
    return float(number) * _UNITS_S[unit]


def _monitored_sync_s(url: str) -> float:
    if not url.startswith(("http://", "https://")):
        raise ValueError("it begins with neither http:// nor https://")
    with urllib.request.urlopen(f"{url.rstrip('/')}/varz", timeout=MONITOR_WAIT_S) as answer:
        told: Mapping[str, Any] = json.loads(answer.read(MONITOR_BYTES_MAX))
    config = told["jetstream"]["config"]
    return 0.0 if config.get("sync_always") else config["sync_interval"] / _NANOSECONDS


def clock(asked: Asked) -> Finding:
    """How far the server's clock is from ours."""
    read = asked.seen_bus().time
    drift = None if read is None else Drift.between(read.before_s, read.there_s, read.after_s)
    return drift_finding("NATS", drift)
