"""From what a person types to files on disk: nothing, a path, or a hub id.

Owns the meaning of MODEL on the command line. Never opens weights (`exec.loader` does) and never guesses between two candidates.
"""

from __future__ import annotations

import errno
import re
from pathlib import Path

from kvseal.core.errors import ModelNotFound
from kvseal.node.demo import DEMO_NAME, demo_model_path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILE = re.compile(rf"({_HUB_ID.pattern}):(.+\.gguf)")
_LOCAL = "Give a directory with config.json and *.safetensors, or a .gguf file"
_HUB = "owner/name, or owner/name:file.gguf,"
_HF_FILES = ["*.json", "*.safetensors", "*.jinja"]


def resolve_model(model: str | None) -> Path:
    """A directory in Hugging Face layout or a .gguf file, fetched first if it is a hub id. Raises `ModelNotFound`.

    `model` is None (the demo model), a path, ``owner/name`` or ``owner/name:file.gguf``.
    """
    if model is None:
        return demo_model_path()
    path = _path(model)
    try:
        if path.exists():
            return _not_empty(path.resolve())
    except OSError as error:
        raise ModelNotFound(f"{model}: cannot be read: {error.strerror}") from error
    if _is_local(model, path):
        raise ModelNotFound(f"{model}: {_fault(path)}. {_LOCAL}; {_HUB} names one on the hub")
    if from_hub := _HUB_FILE.fullmatch(model):
        return _hub_file(from_hub[1], from_hub[2])
    if _HUB_ID.fullmatch(model):
        return _hub_snapshot(model)
    raise ModelNotFound(f"no such model: {model!r} is neither a file nor a directory here nor a hub id. {_LOCAL}, or {_HUB}")


def _path(model: str) -> Path:
    try:
        return Path(model).expanduser()
    except RuntimeError as error:
        raise ModelNotFound(f"{model}: there is no such user, or no home directory") from error


def _not_empty(path: Path) -> Path:
    if path.is_dir() and not any(path.iterdir()):
        raise ModelNotFound(f"{path}: the folder is empty. {_LOCAL}")
    return path


def _is_local(model: str, path: Path) -> bool:
    """Whether somebody who names what is not there can only have meant a file: asking the hub for it would hide the slip."""
    if path.is_absolute() or model.startswith(("./", "../", "~")) or model in (".", "..") or path.is_symlink():
        return True
    if _HUB_FILE.fullmatch(model):
        return False
    return model.endswith(".gguf") or (len(path.parts) > 1 and path.parent.exists())


def _fault(path: Path) -> str:
    """Why a path leads nowhere."""
    for part in (*reversed(path.parents), path):
        if part.is_symlink() and not part.exists():
            return f"the link {part} leads to {part.readlink()}, " + ("a circle" if _is_circle(part) else "which is not there")
        if not part.exists():
            return "no such file or folder" if part == path else f"there is no folder {part}"
        if part != path and not part.is_dir():
            return f"{part} is no folder"
    return "no such file or folder"


def _is_circle(link: Path) -> bool:
    try:
        link.resolve(strict=True)
    except RuntimeError:  # Up to Python 3.12.
        return True
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def model_name(model: str | None, path: Path) -> str:
    """What the server calls the model unless told otherwise."""
    if model is None:
        return DEMO_NAME
    if _path(model).exists():
        return path.stem if path.is_file() else path.name
    return model


def _hub_snapshot(repo_id: str) -> Path:
    import huggingface_hub  # Takes 0.3 s to import: only those who fetch pay it.
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        path = Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=_HF_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise _unreachable(repo_id, error) from error
    if not any(path.glob("*.safetensors")):
        names = sorted(name for name in _hub_names(repo_id) if name.endswith(".gguf"))
        hint = f"; choose one of its GGUF files: kvseal serve {repo_id}:{names[0]}" if names else ""
        raise ModelNotFound(f"{repo_id} holds no *.safetensors{hint}")
    return path


def _hub_file(repo_id: str, filename: str) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.hf_hub_download(repo_id, filename))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise _unreachable(f"{repo_id}:{filename}", error) from error


def _hub_names(repo_id: str) -> list[str]:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return list(huggingface_hub.HfApi().list_repo_files(repo_id))
    except (HfHubHTTPError, OSError):
        return []


def _unreachable(what: str, error: Exception) -> ModelNotFound:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return ModelNotFound(
        f"{what} is not here and could not be fetched from the hub: {reason}. "
        "Check the name, the network and (for gated models) HF_TOKEN, or give a local directory or .gguf file"
    )
