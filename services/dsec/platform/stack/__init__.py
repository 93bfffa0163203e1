"""The embedded stack: NATS, PostgreSQL and the services as child processes of one supervisor."""

from dsec.platform.stack.errors import StackError
from dsec.platform.stack.options import ServiceCommand, StackOptions
from dsec.platform.stack.stack import Stack
from dsec.platform.stack.state import STATE_DIR_VARIABLE, Endpoints, default_state_dir
from dsec.platform.stack.status import (
    ProcessStatus,
    StackStatus,
    StopResult,
    stack_status,
    stop_stack,
)

__all__ = [
    "STATE_DIR_VARIABLE",
    "Endpoints",
    "ProcessStatus",
    "ServiceCommand",
    "Stack",
    "StackError",
    "StackOptions",
    "StackStatus",
    "StopResult",
    "default_state_dir",
    "stack_status",
    "stop_stack",
]
