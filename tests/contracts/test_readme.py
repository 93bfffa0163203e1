"""The README's first snippet, run as it is printed, gets a request into the stream."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import nats
import pytest
from nats.js.api import StreamConfig

from dsec.platform.stack.nats_server import NatsServerOptions, nats_server_process
from dsec.platform.stack.ports import free_port
from dsec.platform.stack.process import ChildProcess
from dsec_contracts import Envelope, SessionRequested, parse, subjects

HASHES = {"AGENT": "a" * 64, "ENV": "b" * 64, "REWARD": "c" * 64}
README = (Path(__file__).parents[2] / "contracts/README.md").read_text()


@pytest.mark.nats
async def test_plain_python_can_ask_for_a_session(tmp_path: Path) -> None:
    script = tmp_path / "request.py"
    script.write_text(re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0])
    # A server of its own: the stream's name and subjects are the real ones.
    options = NatsServerOptions(
        directory=tmp_path, log_path=tmp_path / "nats.log", port=free_port(), password="test"
    )
    server = ChildProcess(nats_server_process(options))
    try:
        await server.wait_ready()
        nc = await nats.connect(options.url)
        js = nc.jetstream()
        await js.add_stream(StreamConfig(name=subjects.STREAM, subjects=subjects.STREAM_SUBJECTS))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            script,
            env={**os.environ, "DSEC_NATS_URL": options.url, **HASHES},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, error = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == 0, error.decode()
        message = await js.get_msg(subjects.STREAM, 1)
        await nc.close()
    finally:
        await server.stop()
    envelope = Envelope.parse(message.headers)
    event = parse(envelope.type, message.data)
    assert isinstance(event, SessionRequested)
    assert message.subject == subjects.subject(event.event_name(), event.fact.session_id)
    assert envelope.subject == str(event.fact.session_id)
    assert event.fact.env_spec == "b" * 64
    assert "position 1" in out.decode()
