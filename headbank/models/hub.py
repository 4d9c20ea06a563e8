"""Asks the hub before a library does, whose retries take a minute when no hub can be reached."""

from huggingface_hub import HfApi, try_to_load_from_cache

from headbank.errors import ModelError

_TIMEOUT_S = 5.0


def require_on_hub(repo_id: str) -> None:
    """Return when a model is in the local cache or on a hub that answers. Raises ModelError otherwise."""
    try:
        if isinstance(try_to_load_from_cache(repo_id, "config.json"), str):
            return
        HfApi().model_info(repo_id, timeout=_TIMEOUT_S)
    # An unreachable hub, a wrong id and offline mode raise unrelated classes.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        raise ModelError(
            f"{repo_id} is no local folder or file, and the model hub does not have it ready "
            f"({type(error).__name__}: {reason}); `headrank pull` fetches catalogue models that have a mirror"
        ) from error
