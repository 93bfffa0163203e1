"""What commands say of an error that the database reports."""

from __future__ import annotations

import pytest
from sqlalchemy import text

from dsec.cli.answer import Refused, answers
from dsec.platform.engine import async_engine


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("select 1 from nowhere", "has no log of this version"),
        ("select nothing from pg_class", "has no log of this version"),
        ("select oid || oid from pg_class", "operator does not exist"),
        ("execute never_prepared", "leads to a pooler"),
    ],
)
async def test_only_what_a_migration_makes_is_of_another_version(
    database_url: str, statement: str, said: str
) -> None:
    engine = async_engine(database_url)
    async with engine.connect() as connection:
        with pytest.raises(Exception, match="does not exist") as raised:
            await connection.execute(text(statement))
    await engine.dispose()

    @answers
    def command() -> None:
        raise raised.value

    with pytest.raises(Refused, match=said):
        command()
