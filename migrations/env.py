"""How Alembic runs here: on a connection it is handed, inside one transaction.

`dsec.platform.migrations.migrate` opens the connection and holds the lock that lets only one of
several starting services migrate; there is no alembic.ini and no offline mode.
"""

from __future__ import annotations

from typing import Any

from alembic import context

from dsec.platform.schema import metadata


def include_name(name: str | None, kind: str, _parents: Any) -> bool:
    """Leave the partitions out: the recorder makes them, the metadata knows their parent."""
    return not (kind == "table" and name is not None and name.startswith("event_log_"))


context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    include_name=include_name,
    compare_type=True,
    compare_server_default=True,
    transaction_per_migration=False,
)
with context.begin_transaction():
    context.run_migrations()
