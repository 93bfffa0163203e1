"""The roles of the log's database as a file for psql, for a PostgreSQL server of one's own."""

from __future__ import annotations

import sys

from dsec.platform.stack.database_roles import (
    DATABASE_ROLES,
    DatabaseRole,
    database_sql,
    grants_sql,
    user_sql,
)

_HEAD = """\
-- Who may do what in the log's database. Written by `just database-roles`: changes made here are
-- lost. A superuser runs it in that database, once the recorder has made the tables with a user who
-- may, and again when a newer version has changed them:
--
--     psql --no-psqlrc --file roles.sql DATABASE
--
-- with the roles' passwords in psql's environment. The recorder is then told the URL of
-- dsec_recorder (DSEC_DATABASE_URL=postgresql://dsec_recorder:PASSWORD@HOST/DATABASE), env-runtime
-- that of dsec_worker, other services that of dsec_reader, and people that of dsec_client.
-- Afterwards whoever is neither one of these nor the owner can no longer connect to the database.
\\set ON_ERROR_STOP on
"""


def variable(role: DatabaseRole) -> str:
    """The variable that holds a role's password: `DSEC_DATABASE_PASSWORD_RECORDER`."""
    return f"DSEC_DATABASE_PASSWORD_{role.name.upper()}"


def deploy_file() -> str:
    """The whole file."""
    passwords = "".join(f"\\getenv {role.user} {variable(role)}\n" for role in DATABASE_ROLES)
    # Without its variable a role's password is no literal, and the file ends with an error there.
    users = "".join(user_sql(role.user, f":'{role.user}'") for role in DATABASE_ROLES)
    return _HEAD + passwords + users + database_sql() + grants_sql()


if __name__ == "__main__":
    sys.stdout.write(deploy_file())
