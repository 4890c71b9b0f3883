from __future__ import annotations

import pytest

from tests.helm.tools import SCENARIOS, Helm, Objects, helm_4


@pytest.fixture(scope="session")
def helm() -> Helm:
    return helm_4()


@pytest.fixture(scope="session")
def defaults(helm: Helm) -> Objects:
    """What `helm install wf helm/` makes."""
    return helm.template()


@pytest.fixture(scope="session")
def scenarios(helm: Helm) -> dict[str, Objects]:
    """The objects of each ci/ scenario, by its name."""
    return {path.stem.removesuffix("-values"): helm.template(values=path) for path in SCENARIOS}
