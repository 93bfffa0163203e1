"""The reward service as its composition root starts it, but for where specs come from: a folder."""

from __future__ import annotations

import sys
from pathlib import Path

import uvloop

from dsec.platform.settings import configure_logging
from dsec.platform.specs import SpecMissing
from dsec.reward.__main__ import score_until_stopped
from dsec.reward.settings import RewardSettings
from dsec_contracts.service import ServiceFact


async def from_folder(spec_hash: str, _: int) -> bytes:
    path = Path(sys.argv[1]) / spec_hash
    if not path.exists():
        raise SpecMissing(f"{path} is not there")
    return path.read_bytes()


async def declared(_: int) -> dict[str, ServiceFact]:
    found = map(Path.read_bytes, Path(sys.argv[1]).glob("*.service"))
    facts = map(ServiceFact.model_validate_json, found)
    return {fact.name: fact for fact in facts}


def main() -> int:
    configure_logging("reward", "INFO")
    return uvloop.run(score_until_stopped(RewardSettings(), from_folder, None, declared))
