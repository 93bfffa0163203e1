# The project's commands. `just` alone lists them.

# Processes start a fifth sooner where they may keep their compiled modules.
export PYTHONDONTWRITEBYTECODE := ""

# Most tests wait for servers: three processes for two cores.
spread := "-n 3 --dist loadgroup --no-loadscope-reorder"

default:
    @just --list

# Style, types, layers and the freeze of published schemas
check:
    ruff check .
    ruff format --check .
    mypy services contracts loadtests tests/simulation tests/forked.py tests/conftest.py
    lint-imports
    python -m dsec_contracts.freeze --check

# The test suite; starts every server that it needs
test *arguments:
    python -m pytest -m "not long" {{spread}} {{arguments}}

# The tests that `just test` leaves out for their length, too
test-all *arguments:
    python -m pytest {{spread}} {{arguments}}

# Format and mend what can be mended
fix:
    ruff check --fix .
    ruff format .

# Publish new or compatibly changed schemas
freeze:
    python -m dsec_contracts.freeze --write

# Write the users and permissions of a NATS server of one's own
nats-users:
    mkdir -p deploy/nats
    python -m dsec.platform.nats_users > deploy/nats/authorization.conf

# Write the roles and permissions of a PostgreSQL server of one's own
database-roles:
    mkdir -p deploy/postgres
    python -m dsec.platform.stack.database_roles_file > deploy/postgres/roles.sql

# Steps a second beside a bare loop; arguments go to the script
throughput *arguments:
    python loadtests/throughput.py {{arguments}}

# All services in virtual time under faults: `just simulate SEED`, or `just simulate --seeds 2000`
simulate *arguments:
    python -m tests.simulation {{arguments}}

# Take each guard behind a promise away and see that its test fails: all, or those with a word
mutants *arguments:
    python -m tests.mutants.run {{arguments}}

# Kill everything, again and again, and compare with an undisturbed run; arguments go to the script
chaos *arguments:
    python loadtests/chaos.py {{arguments}}
