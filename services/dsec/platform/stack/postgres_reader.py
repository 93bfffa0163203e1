"""The role of everybody who only reads the log: all services but the recorder.

Workers run user code in the process that holds the URL, so what that URL opens is all that user
code could ever do to the database. Tables are made by later migrations too: they are readable from
the moment that they are there.
"""

from __future__ import annotations

import asyncpg

READER = "dsec_reader"
OWNER = "dsec"

_MADE = f"""
do $$ begin
    if not exists (select from pg_roles where rolname = '{READER}') then
        create role {READER};
    end if;
end $$;
alter role {READER} with login nosuperuser nocreatedb nocreaterole noreplication
    connection limit -1 password '%s';
grant usage on schema public to {READER};
grant select on all tables in schema public to {READER};
alter default privileges for role {OWNER} in schema public grant select on tables to {READER};
"""


async def ensure_reader(connection: asyncpg.Connection, password: str) -> None:
    """Make the role and let it read, with this password from now on.

    Args:
        connection: the owner's, to the database of the log.
        password: URL-safe, so that it stands in quotes as it is.

    Raises:
        ValueError: the password has a quote or a backslash in it.
    """
    if set(password) & set("'\\"):
        raise ValueError("the reader's password cannot stand in quotes")
    await connection.execute(_MADE % password)
