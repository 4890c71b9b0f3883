"""How a command ends: 0 done, 1 it failed, 2 wrong use or environment, 3 a deadline passed. Always one line."""

from __future__ import annotations

import click


class Failure(click.ClickException):
    """Something that should have worked did not."""

    exit_code = 1


class WrongUse(Failure):
    """The caller can mend it: a value, a port, a file, a service that is not there."""

    exit_code = 2


class Lost(Failure):
    """What this process runs with has died, and its threads cannot be ended: it leaves without taking them down."""


class DeadlinePassed(Failure):
    """It may still happen, but not within the time that was given."""

    exit_code = 3


class Served(int):
    """The exit code of a command that ran servers: its process ends at once.

    Threads of gRPC's and torch's own may still run then. One that comes back to an interpreter that is being taken down
    is ended in the middle of C++, which aborts the process now and then: another exit code than the one that was meant.
    """
