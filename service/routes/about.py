"""`GET /v1/models` and `/info`: what is served, and within which limits."""

from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi.security import HTTPBearer
from starlette.requests import Request

import headbank
from headbank.errors import EngineUnavailable
from headbank.types import View
from service.auth import check_key
from service.engine import EngineInfo
from service.schemas import (
    ErrorResponse,
    HeadSetInfo,
    Info,
    Limits,
    ServedModel,
    ServedModels,
    ServedView,
)
from service.state import State, state_of


def _authorised(request: Request) -> State:
    state = state_of(request)
    check_key(request, state.settings.api_keys)
    return state


def _views(engine: EngineInfo) -> dict[View, ServedView]:
    layouts = {heads.name: heads.style.layout for heads in engine.head_sets}
    return {view: ServedView(head_set=name, layout=layouts[name]) for view, name in engine.defaults.items()}


router = APIRouter(
    tags=["about"],
    dependencies=[Depends(HTTPBearer(auto_error=False))],
    responses={401: {"model": ErrorResponse, "description": "API key missing or wrong"}},
)


@router.get("/v1/models")
async def models(state: Annotated[State, Depends(_authorised)]) -> ServedModels:
    """The served model, as OpenAI's clients list it."""
    engine = state.worker.info
    served = ServedModel(
        id=state.settings.model_name,
        created=int(state.started),
        methods=[] if engine is None else list(engine.methods),
        views={} if engine is None else _views(engine),
    )
    return ServedModels(data=[served])


@router.get("/info", responses={503: {"model": ErrorResponse, "description": "Engine not loaded yet"}})
async def info(state: Annotated[State, Depends(_authorised)]) -> Info:
    """The model, its heads and the limits, as Text Embeddings Inference's clients read them, and more."""
    engine, settings = state.worker.info, state.settings
    if engine is None:
        raise EngineUnavailable(f"the engine is not ready ({state.worker.state})")
    return Info(
        model_id=engine.model.model_id,
        model_sha=engine.model.revision or None,
        model_dtype=engine.model.dtype,
        served_model_name=settings.model_name,
        model_type={"reranker": {"id2label": {}, "label2id": {}}},
        max_concurrent_requests=settings.queue_requests,
        max_input_length=settings.max_tokens_per_doc,
        max_batch_tokens=settings.batch_tokens,
        max_batch_requests=None,
        max_client_batch_size=settings.max_documents,
        auto_truncate=True,
        tokenization_workers=1,
        version=headbank.__version__,
        sha=None,
        docker_label=None,
        methods=list(engine.methods),
        default_method=settings.default_method,
        default_view=settings.default_view,
        views=_views(engine),
        head_sets=[
            HeadSetInfo(
                name=heads.name,
                view=heads.view,
                layout=heads.style.layout,
                heads=[str(head) for head in heads.heads],
                default_aggregation=heads.default_aggregation,
                strict_experts=heads.strict_experts,
            )
            for heads in engine.head_sets
        ],
        limits=Limits(
            max_body_bytes=settings.max_body_bytes,
            max_documents=settings.max_documents,
            max_query_chars=settings.max_query_chars,
            max_tokens_per_doc=settings.max_tokens_per_doc,
            request_timeout_s=settings.request_timeout_s,
        ),
    )
