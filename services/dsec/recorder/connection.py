"""How the recorder connects to PostgreSQL: its own connections, in libpq's own protocol.

They must be sessions of the server itself, not of a pooler that hands out transactions: the
advisory lock lives and dies with its connection.
"""

from __future__ import annotations

from typing import Any

import psycopg

from dsec.platform.db import CONNECT_TIMEOUT_S, libpq_url

KEEPALIVE_IDLE_S = 5
KEEPALIVE_INTERVAL_S = 2
KEEPALIVE_COUNT = 3
IDLE_IN_TRANSACTION_LIMIT_S = 60
LOCK_WAIT_S_MAX = 10

# A dead peer has to be noticed on both sides, or its lock would outlive it by hours.
_SERVER_OPTIONS = (
    f"-c tcp_keepalives_idle={KEEPALIVE_IDLE_S}"
    f" -c tcp_keepalives_interval={KEEPALIVE_INTERVAL_S}"
    f" -c tcp_keepalives_count={KEEPALIVE_COUNT}"
    f" -c idle_in_transaction_session_timeout={IDLE_IN_TRANSACTION_LIMIT_S}s"
    f" -c lock_timeout={LOCK_WAIT_S_MAX}s -c timezone=UTC"
    # A batch of old rows, delivered again, may meet more compressed ones than TimescaleDB would
    # allow, and would never get in. Without TimescaleDB nobody reads this.
    " -c timescaledb.max_tuples_decompressed_per_dml_transaction=0"
)


async def connect(database_url: str, name: str) -> psycopg.AsyncConnection[Any]:
    """A connection whose transactions are explicit and whose statements are never prepared."""
    return await psycopg.AsyncConnection.connect(
        libpq_url(database_url),
        autocommit=True,
        prepare_threshold=None,
        connect_timeout=CONNECT_TIMEOUT_S,
        application_name=name,
        keepalives_idle=KEEPALIVE_IDLE_S,
        keepalives_interval=KEEPALIVE_INTERVAL_S,
        keepalives_count=KEEPALIVE_COUNT,
        options=_SERVER_OPTIONS,
    )
