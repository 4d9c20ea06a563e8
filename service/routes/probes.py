"""`GET /health`, `/readyz`, `/metrics`: open to everyone, cheap, independent of the engine's load."""

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from service.schemas import Health, Readiness
from service.state import state_of

router = APIRouter(tags=["probes"])


@router.get("/health")
async def health() -> Health:
    """Whether the process lives; says nothing about the engine."""
    return Health()


@router.get("/readyz", responses={503: {"model": Readiness, "description": "Not ready"}})
async def readyz(request: Request, response: Response) -> Readiness:
    """Whether requests are answered: 200 when the engine is loaded and warm, else 503."""
    worker = state_of(request).worker
    ready = worker.state == "ready"
    response.status_code = 200 if ready else 503
    return Readiness(ready=ready, state=worker.state, reason=worker.reason)


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    return Response(state_of(request).metrics.exposition(), media_type=CONTENT_TYPE_LATEST)
