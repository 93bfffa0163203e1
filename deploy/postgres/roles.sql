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
\set ON_ERROR_STOP on
\getenv dsec_recorder DSEC_DATABASE_PASSWORD_RECORDER
\getenv dsec_reader DSEC_DATABASE_PASSWORD_READER
\getenv dsec_worker DSEC_DATABASE_PASSWORD_WORKER
\getenv dsec_client DSEC_DATABASE_PASSWORD_CLIENT

do $$ begin
    if not exists (select from pg_roles where rolname = 'dsec_recorder') then
        create role dsec_recorder;
    end if;
end $$;
alter role dsec_recorder with login nosuperuser nocreatedb nocreaterole noreplication nobypassrls
    connection limit -1 valid until 'infinity' password :'dsec_recorder';
alter role dsec_recorder reset all;

do $$ begin
    if not exists (select from pg_roles where rolname = 'dsec_reader') then
        create role dsec_reader;
    end if;
end $$;
alter role dsec_reader with login nosuperuser nocreatedb nocreaterole noreplication nobypassrls
    connection limit -1 valid until 'infinity' password :'dsec_reader';
alter role dsec_reader reset all;

do $$ begin
    if not exists (select from pg_roles where rolname = 'dsec_worker') then
        create role dsec_worker;
    end if;
end $$;
alter role dsec_worker with login nosuperuser nocreatedb nocreaterole noreplication nobypassrls
    connection limit -1 valid until 'infinity' password :'dsec_worker';
alter role dsec_worker reset all;

do $$ begin
    if not exists (select from pg_roles where rolname = 'dsec_client') then
        create role dsec_client;
    end if;
end $$;
alter role dsec_client with login nosuperuser nocreatedb nocreaterole noreplication nobypassrls
    connection limit -1 valid until 'infinity' password :'dsec_client';
alter role dsec_client reset all;

do $$ begin
    execute format('revoke all on database %I from public', current_database());
    execute format('grant connect on database %I to dsec_recorder, dsec_reader, dsec_worker, dsec_client', current_database());
    execute format('grant temporary on database %I to dsec_recorder', current_database());
end $$;

do $$ declare function regprocedure; begin
    for function in
        select p.oid from pg_proc p where p.pronamespace = 'pg_catalog'::regnamespace
            and (p.proname ~ '^pg_(try_)?advisory_(xact_)?lock(_shared)?$' or p.proname in ('lo_creat', 'lo_create', 'lo_from_bytea', 'pg_logical_emit_message', 'pg_terminate_backend', 'pg_cancel_backend'))
            and has_function_privilege('public', p.oid, 'execute')
    loop
        execute format('revoke execute on function %s from public', function);
    end loop;
end $$;
revoke create on schema public from public;
grant usage on schema public to dsec_recorder, dsec_reader, dsec_worker, dsec_client;
grant select on all tables in schema public to dsec_recorder, dsec_reader, dsec_worker, dsec_client;
alter default privileges in schema public grant select on tables to dsec_recorder, dsec_reader, dsec_worker, dsec_client;
do $$ declare function regprocedure; begin
if to_regclass('public.event_log') is not null then grant insert on public.event_log to dsec_recorder; end if;
if to_regclass('public.event_aside') is not null then grant insert on public.event_aside to dsec_recorder; end if;
if to_regclass('public.event_parked') is not null then grant insert, delete on public.event_parked to dsec_recorder; end if;
if to_regclass('public.log_floor') is not null then grant insert, update on public.log_floor to dsec_recorder; end if;
if to_regclass('public.session_live') is not null then grant insert, update, delete on public.session_live to dsec_recorder; end if;
if to_regprocedure('public.event_log_partition(timestamptz, integer)') is not null then alter function public.event_log_partition(timestamptz, integer) security definer; alter function public.event_log_partition(timestamptz, integer) set search_path = public, pg_temp; revoke execute on function public.event_log_partition(timestamptz, integer) from public; grant execute on function public.event_log_partition(timestamptz, integer) to dsec_recorder; end if;
if to_regprocedure('public.event_log_drop(timestamptz)') is not null then alter function public.event_log_drop(timestamptz) security definer; alter function public.event_log_drop(timestamptz) set search_path = public, pg_temp; revoke execute on function public.event_log_drop(timestamptz) from public; grant execute on function public.event_log_drop(timestamptz) to dsec_recorder; end if;
if exists (select from pg_roles where rolname = 'pg_use_reserved_connections') then grant pg_use_reserved_connections to dsec_recorder; end if;
for function in select p.oid from pg_proc p where p.pronamespace = 'pg_catalog'::regnamespace and p.proname ~ '^pg_(try_)?advisory_(xact_)?lock(_shared)?$' loop execute format('grant execute on function %s to dsec_recorder', function); end loop;
end $$;
