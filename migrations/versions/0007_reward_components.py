"""The components of rewards in SQL: read from the canonical bytes of the facts, bit for bit.

A reward's fact is `[step, revision, value, {name: [score, weight]}, cause]` in deterministic CBOR,
and that shape alone is read here. What is not of it gives no rows: a view must not fail.
"""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

FUNCTIONS = """
create function binary64(bytes bytea) returns double precision
language sql immutable strict parallel safe
as $$
    select case
        when exponent = 2047 and fraction <> 0 then 'NaN'::float8
        when exponent = 2047 then sign * 'Infinity'::float8
        -- In two halves: the power itself would be less than the least there is.
        when exponent = 0
            then sign * (fraction::float8 * power(2::float8, -537) * power(2::float8, -537))
        else sign * (1 + fraction::float8 / 4503599627370496) * power(2::float8, exponent - 1023)
    end
    from (
        select
            case when get_bit(bits, 0) = 1 then -1::float8 else 1::float8 end as sign,
            substring(bits from 2 for 11)::integer as exponent,
            substring(bits from 13 for 52)::bigint as fraction
        from (select ('x' || encode(bytes, 'hex'))::bit(64) as bits) b
    ) parts
$$;
comment on function binary64(bytea) is 'eight bytes, big-endian, as the IEEE 754 number they are';

create function reward_components(fact bytea)
returns table (name text, score double precision, weight double precision)
language plpgsql immutable strict parallel safe
as $$
declare
    at integer := 1;
    first integer;
    size integer;
    width integer;
    pairs text;
begin
    -- Counted as get_byte counts, from 0. After the array's head: step and revision.
    for part in 1 .. 2 loop
        first := get_byte(fact, at) & 31;
        at := at + 1 + case first when 24 then 1 when 25 then 2 when 26 then 4 else 0 end;
    end loop;
    at := at + 9;  -- the value
    if get_byte(fact, at) >> 5 <> 5 then
        return;
    end if;
    size := get_byte(fact, at) & 31;
    at := at + 1;
    if size = 24 then
        size := get_byte(fact, at);
        at := at + 1;
    elsif size = 25 then
        size := get_byte(fact, at) * 256 + get_byte(fact, at + 1);
        at := at + 2;
    end if;
    for component in 1 .. size loop
        if get_byte(fact, at) >> 5 <> 3 then
            return;  -- a name that is no text
        end if;
        width := get_byte(fact, at) & 31;
        at := at + 1;
        if width = 24 then
            width := get_byte(fact, at);
            at := at + 1;
        elsif width = 25 then
            width := get_byte(fact, at) * 256 + get_byte(fact, at + 1);
            at := at + 2;
        end if;
        -- A text of the server's holds no NUL: a picture of it stands in.
        pairs := regexp_replace(encode(substring(fact from at + 1 for width), 'hex'),
            '(..)', '\\1 ', 'g');
        name := convert_from(
            decode(replace(replace(pairs, '00 ', 'e29080 '), ' ', ''), 'hex'), 'UTF8');
        at := at + width + 2;  -- and the head of the pair, and of its first number
        score := binary64(substring(fact from at + 1 for 8));
        weight := binary64(substring(fact from at + 10 for 8));
        at := at + 17;
        return next;
    end loop;
exception when array_subscript_error or character_not_in_repertoire then
    return;
end
$$;
comment on function reward_components(bytea) is
    'the components of the fact of a reward.scored row: name, score, weight';
"""

REWARD_COMPONENT = """
create view reward_component as
select
    w.session_id,
    w.session_at,
    w.step,
    split_part(w.key, '.', 2)::integer as revision,
    c.name,
    c.score,
    c.weight
from event_log w
cross join lateral reward_components(w.fact) c
where w.kind = 'reward.scored'
"""

COMMENT = "one row a named component of a reward, of every revision"
COLUMNS = {
    "session_id": "the session",
    "session_at": "the time in its id, equal to session_time(session_id)",
    "step": "the step that is rewarded",
    "revision": "from 1; the highest counts",
    "name": "as the reward function names it",
    "score": "what the function returned under that name",
    "weight": "of the sum: the reward is the sum of score times weight",
}


def upgrade() -> None:
    connection = op.get_bind()
    connection.exec_driver_sql((FUNCTIONS + REWARD_COMPONENT).replace("%", "%%"))
    connection.exec_driver_sql(f"comment on view reward_component is '{COMMENT}'")
    for column, text in COLUMNS.items():
        connection.exec_driver_sql(f"comment on column reward_component.{column} is '{text}'")


def downgrade() -> None:
    raise NotImplementedError("the log is append-only: restore a backup instead")
