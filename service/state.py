"""What the routes of one app share."""

import time
from dataclasses import dataclass, field

from starlette.requests import Request

from service.metrics import Metrics
from service.settings import Settings
from service.worker import Worker


@dataclass(frozen=True)
class State:
    """Kept in `app.state.headrank`."""

    settings: Settings
    worker: Worker
    metrics: Metrics
    started: float = field(default_factory=time.time)

    @property
    def compute_type(self) -> str:
        """`cpu` or `gpu`; `cpu` until the engine has told."""
        return self.worker.info.device if self.worker.info else "cpu"


def state_of(request: Request) -> State:
    """The state of the app that handles the request."""
    state: State = request.app.state.headrank
    return state
