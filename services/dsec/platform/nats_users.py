"""The users of a NATS server and their permissions, as its configuration says them.

The embedded stack writes them with its passwords; `python -m dsec.platform.nats_users` prints
the same for a server of one's own, where each password is a variable of that server's environment.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping

from dsec.platform.roles import OPERATOR, ROLES, Role

_HEAD = """\
# Who may do what on the bus. Written by `just nats-users`: changes made here are lost.
# Include it in the configuration of nats-server (`include ./authorization.conf`), and give the
# passwords in the server's environment. Each service is told the URL of its own user, for example
# DSEC_NATS_URL=nats://dsec-reward:PASSWORD@HOST:4222
"""


def authorization(passwords: Mapping[str, str]) -> str:
    """The block `authorization` of a configuration.

    Args:
        passwords: by user, as they stand in the configuration: strings in quotes, or `$VARIABLE`.
            Who has none is left out.
    """
    users = [_user(role, passwords[role.user]) for role in ROLES if role.user in passwords]
    operator = f'    {{ user: "{OPERATOR}", password: {passwords[OPERATOR]} }}'
    return "authorization {\n  users = [\n" + "\n".join([operator, *users]) + "\n  ]\n}\n"


def users() -> tuple[str, ...]:
    """All users."""
    return OPERATOR, *(role.user for role in ROLES)


def variable(user: str) -> str:
    """The variable that holds a user's password: `DSEC_NATS_PASSWORD_REWARD`."""
    name = user.removeprefix("dsec").strip("-").replace("-", "_").upper()
    return f"DSEC_NATS_PASSWORD_{name or 'OPERATOR'}"


def deploy_file() -> str:
    """The file for a server of one's own."""
    return _HEAD + authorization({user: f"${variable(user)}" for user in users()})


def _user(role: Role, password: str) -> str:
    rules = [f"allow: {_list(role.may_publish())}"]
    if denied := role.must_not_publish():
        rules.append(f"deny: {_list(denied)}")
    publish = "\n".join(f"          {rule}" for rule in rules)
    return f"""\
    {{
      user: "{role.user}", password: {password}
      permissions {{
        publish {{
{publish}
        }}
        subscribe {{ allow: {_list(role.may_subscribe())} }}
      }}
    }}"""


def _list(subjects: Iterable[str]) -> str:
    lines = ",\n".join(f"            {json.dumps(subject)}" for subject in subjects)
    return f"[\n{lines}\n          ]"


if __name__ == "__main__":
    sys.stdout.write(deploy_file())
