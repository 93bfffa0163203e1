"""`python -m dsec.reward`: the composition root of one replica of the reward service."""

from __future__ import annotations

import os
import sys
import time

from dsec.platform.app import ServiceApp
from dsec.platform.clock import utc_now
from dsec.platform.log import LogReader
from dsec.platform.objects import ObjectStore
from dsec.platform.service import Replica, run, serve
from dsec.platform.specs import Patience, SpecSource, spec_source
from dsec.reward.asking import Outsides
from dsec.reward.declarations import Declarations, DeclarationSource, declaration_source
from dsec.reward.effects import Keep, Specs, blob_source
from dsec.reward.episodes import Episodes
from dsec.reward.handlers import CONSUMER, Rewarder
from dsec.reward.isolation import Isolation
from dsec.reward.recheck import Recheck
from dsec.reward.rescoring import CONSUMER as RESCORE
from dsec.reward.rescoring import Rescorer
from dsec.reward.settings import RewardSettings
from dsec.reward.waiting import Beside
from dsec_contracts import RewardRescoreRequested, SessionStepped, subjects


async def score(settings: RewardSettings) -> int:
    """Score until SIGTERM or SIGINT."""
    log_reader = await LogReader.connect(settings.database_url)
    url = settings.object_store_url
    objects = ObjectStore(url) if url else None
    try:
        source = spec_source(log_reader, objects, "reward", settings.reward_spec_wait_s)
        declared = declaration_source(log_reader, settings.reward_spec_wait_s)
        return await score_until_stopped(settings, source, objects, declared, log_reader)
    finally:
        await log_reader.close()


async def score_until_stopped(
    settings: RewardSettings,
    source: SpecSource,
    objects: ObjectStore | None,
    declared: DeclarationSource,
    log_reader: LogReader | None = None,
) -> int:
    """The service, with specs from `source` and outside services from `declared`. Without a log
    nothing is scored anew. Returns the process's exit code."""

    async def work(replica: Replica) -> None:
        limits = settings.user_limits(settings.reward_memory_bytes_max)
        functions = Isolation(settings.reward_deadline_s, limits)
        try:
            await _score(replica, settings, functions, source, objects, declared, log_reader)
        finally:
            await functions.close()

    return await serve(settings, "reward", settings.reward_replica, work)


async def _score(
    replica: Replica,
    settings: RewardSettings,
    functions: Isolation,
    source: SpecSource,
    objects: ObjectStore | None,
    declared: DeclarationSource,
    log_reader: LogReader | None,
) -> None:
    bus = replica.bus
    patience = Patience(settings.reward_absent_s_max)
    specs = Specs(source, patience=patience, kept_max=settings.reward_specs_max)
    blobs = blob_source(objects, patience)
    outsides = Outsides(
        bus,
        Declarations(declared, patience, time.monotonic),
        settings.reward_replica,
        os.environ,
        time.time,
    )
    episodes = None
    if log_reader is not None:
        episodes = Episodes(log_reader, blobs, settings.reward_spec_wait_s)
    beside = Beside(outsides, Keep(objects), _recheck(settings), episodes)
    told = replica.telemetry
    rewarder = Rewarder(bus, specs, functions, blobs, settings, utc_now, told, beside)

    app = ServiceApp(
        bus,
        settings.nats_url,
        replica.name,
        stop_s_max=settings.reward_stop_s_max,
        ack_wait_s=settings.reward_ack_wait_s,
    )
    stepped = subjects.every(SessionStepped.event_name())
    await app.handle(CONSUMER, stepped, rewarder.on_session_stepped)
    if log_reader is not None:
        rescorer = Rescorer(
            bus, log_reader, specs, rewarder.turns, beside, blobs, settings, utc_now
        )
        requested = subjects.every(RewardRescoreRequested.event_name())
        await app.handle(RESCORE, requested, rescorer.on_reward_rescore_requested)
    try:
        await app.run_beside(rewarder.close, replica.stop)
    finally:
        await outsides.close()


def _recheck(settings: RewardSettings) -> Recheck:
    limits = settings.user_limits(settings.reward_memory_bytes_max)

    def fresh() -> Isolation:
        return Isolation(settings.reward_deadline_s, limits, watches_state=True)

    return Recheck(fresh, time.monotonic, settings.reward_recheck_s)


def main() -> int:
    """Run the service."""
    settings = RewardSettings()
    return run("reward", settings, score(settings))


if __name__ == "__main__":
    sys.exit(main())
