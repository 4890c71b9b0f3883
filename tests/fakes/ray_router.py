"""A router actor whose servers can be told to hang, while its process goes on."""

from __future__ import annotations

import time

from router.actor import RouterActor
from router.launcher import Desired
from warmfront.actors import RayLauncher, router_config


class RayRouter(RouterActor):
    def hang(self) -> None:
        self._loop.call_soon_threadsafe(time.sleep, 3600)


def launcher(desired: Desired) -> RayLauncher:
    return RayLauncher(desired, {"router": (RayRouter, router_config)})
