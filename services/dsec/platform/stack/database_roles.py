"""Who may do what in the log's database: one table, from which the embedded server's grants come.

The owner makes the tables and is only `dsec up`'s. Whoever else connects has a role that may do
what it does and nothing more. Workers run user code in the process that holds the URL, so what
theirs opens is all that user code could ever do to the database; and they have one apart from the
other services', because what PostgreSQL refuses nobody is to change one's own password and the
settings that one's own role begins with.

What everybody may by default, and nobody here needs, is taken away: locks by number (who takes the
recorder's keeps the log from being written), large objects, messages in the write-ahead log,
temporary tables, and ending other connections of one's own role.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import asyncpg

OWNER = "dsec"
SCHEMA = "public"
_USER_PREFIX = "dsec_"


@dataclass(frozen=True, slots=True)
class DatabaseRole:
    """What one kind of process may do beside reading everything in the log.

    `writes`: privileges, by table. `calls`: functions that do with the owner's rights what needs
    them. `temporary`: it may make temporary tables. `locks`: it may take locks by number.
    `reserved`: connections are kept for it, where the server can (PostgreSQL 16 and newer).
    """

    name: str
    writes: Mapping[str, str] = field(default_factory=dict)
    calls: tuple[str, ...] = ()
    temporary: bool = False
    locks: bool = False
    reserved: bool = False

    @property
    def user(self) -> str:
        """Its user on the server."""
        return f"{_USER_PREFIX}{self.name}"


RECORDER = DatabaseRole(
    "recorder",
    writes={
        "event_log": "insert",
        "event_aside": "insert",
        "event_parked": "insert, delete",
        "log_floor": "insert, update",
        "session_live": "insert, update, delete",
    },
    calls=(
        "event_log_partition(timestamptz, integer)",
        "event_log_drop(timestamptz)",
    ),
    temporary=True,  # where it compares what was delivered again
    locks=True,
    reserved=True,
)
READER = DatabaseRole("reader")
WORKER = DatabaseRole("worker")
CLIENT = DatabaseRole("client")
DATABASE_ROLES = (RECORDER, READER, WORKER, CLIENT)
"""Every role but the owner's."""
_OF_SERVICES = {"recorder": RECORDER, "env-runtime": WORKER}


def database_role_of(service: str) -> DatabaseRole:
    """The role of a service; those that are not named only read."""
    return _OF_SERVICES.get(service, READER)


_NOBODYS = ("lo_creat", "lo_create", "lo_from_bytea", "pg_logical_emit_message",
            "pg_terminate_backend", "pg_cancel_backend")  # fmt: skip
_LOCKS = "^pg_(try_)?advisory_(xact_)?lock(_shared)?$"
_ALL = ", ".join(role.user for role in DATABASE_ROLES)


def users_sql(passwords: Mapping[str, str]) -> str:
    """Make the roles, which are the whole server's, with these passwords from now on. What one
    has set for itself is set back."""
    return "".join(
        user_sql(user, "'" + password.replace("'", "''") + "'")
        for user, password in passwords.items()
    )


def user_sql(user: str, password: str) -> str:
    """Make one of them. `password`: as it stands in the statement, quotes included."""
    return f"""
do $$ begin
    if not exists (select from pg_roles where rolname = '{user}') then
        create role {user};
    end if;
end $$;
alter role {user} with login nosuperuser nocreatedb nocreaterole noreplication nobypassrls
    connection limit -1 valid until 'infinity' password {password};
alter role {user} reset all;
"""


def database_sql() -> str:
    """Who may connect, and who may make temporary tables."""
    may_make = ", ".join(role.user for role in DATABASE_ROLES if role.temporary)
    return f"""
do $$ begin
    execute format('revoke all on database %I from public', current_database());
    execute format('grant connect on database %I to {_ALL}', current_database());
    execute format('grant temporary on database %I to {may_make}', current_database());
end $$;
"""


def _for_all_sql() -> str:
    """What all have, and what all have no more."""
    return f"""
do $$ declare function regprocedure; begin
    for function in
        select p.oid from pg_proc p where p.pronamespace = 'pg_catalog'::regnamespace
            and (p.proname ~ '{_LOCKS}' or p.proname in {_NOBODYS})
            and has_function_privilege('public', p.oid, 'execute')
    loop
        execute format('revoke execute on function %s from public', function);
    end loop;
end $$;
revoke create on schema {SCHEMA} from public;
grant usage on schema {SCHEMA} to {_ALL};
grant select on all tables in schema {SCHEMA} to {_ALL};
alter default privileges in schema {SCHEMA} grant select on tables to {_ALL};
"""


def _role_sql(role: DatabaseRole) -> str:
    """What one has beside that, as far as tables and functions are there yet; empty: nothing."""
    user = role.user
    lines = [
        f"if to_regclass('{SCHEMA}.{table}') is not null then"
        f" grant {privileges} on {SCHEMA}.{table} to {user}; end if;"
        for table, privileges in role.writes.items()
    ]
    for call in role.calls:
        # Temporary tables come last in its path, or the caller's would stand in for the log's.
        lines.append(
            f"if to_regprocedure('{SCHEMA}.{call}') is not null then"
            f" alter function {SCHEMA}.{call} security definer;"
            f" alter function {SCHEMA}.{call} set search_path = {SCHEMA}, pg_temp;"
            f" revoke execute on function {SCHEMA}.{call} from public;"
            f" grant execute on function {SCHEMA}.{call} to {user}; end if;"
        )
    if role.reserved:
        lines.append(
            "if exists (select from pg_roles where rolname = 'pg_use_reserved_connections') then"
            f" grant pg_use_reserved_connections to {user}; end if;"
        )
    if role.locks:
        lines.append(
            "for function in select p.oid from pg_proc p"
            " where p.pronamespace = 'pg_catalog'::regnamespace"
            f" and p.proname ~ '{_LOCKS}' loop"
            f" execute format('grant execute on function %s to {user}', function); end loop;"
        )
    if not lines:
        return ""
    body = "\n".join(lines)
    return f"do $$ declare function regprocedure; begin\n{body}\nend $$;\n"


def grants_sql() -> str:
    """All that roles which are there may do once they are connected, in the database that it is
    run in, by its owner.

    Tables that come later are readable at once; what else there is to grant on them wants this
    again, and so does a function that a migration made anew.
    """
    return _for_all_sql() + "".join(_role_sql(role) for role in DATABASE_ROLES)


async def ensure_roles(connection: asyncpg.Connection, passwords: Mapping[str, str]) -> None:
    """Make the roles and let each do what it may. Safe to repeat.

    Args:
        connection: the owner's, to the database of the log.
        passwords: by user.
    """
    # Apart, so that no statement which may meet another's lock has passwords in it.
    await connection.execute(users_sql(passwords))
    await connection.execute(database_sql() + grants_sql())


async def close_to_roles(connection: asyncpg.Connection) -> None:
    """Let nobody but the owner into a database that is not the log's."""
    name = await connection.fetchval("select quote_ident(current_database())")
    await connection.execute(f"revoke connect, temporary on database {name} from public")
