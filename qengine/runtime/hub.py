"""From a model's name to a local folder: a folder as it is, or a snapshot from the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from qengine.errors import CheckpointError, ConfigError, UserError
from qengine.runtime.weight_files import PICKLED

Say = Callable[[str], None]

DEMO = "demo"
"""Names the demo model wherever a model is named."""
REPO = re.compile(r"[\w.-]+(/[\w.-]+)?")
WANTED = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.txt", "LICENSE*", "NOTICE*")
UNWANTED = ("consolidated*.safetensors", "original/*", "onnx/*", "*/*")
LOCAL_HINT = "a local model folder works without the hub"


def resolve_folder(
    name: str,
    *,
    revision: str | None = None,
    pickled: bool = False,
    config_only: bool = False,
    say: Say = lambda line: None,
) -> Path:
    """`name` as a local folder, else the demo model where it is "demo", else downloaded (or found in the hub's cache)
    as a hub name.

    Only safetensors, JSON, tokenizer and template files are fetched; pickled weights where there are no others, or when
    `pickled` asks for them (nothing is unpickled here); with `config_only` nothing but JSON. Raises CheckpointError
    with one line: what was tried and what would work.
    """
    local = Path(name).expanduser()
    if local.is_dir():
        if revision is not None:
            raise ConfigError(
                "--revision is for hub models", have=f"the local folder {name}", hint="leave --revision out"
            )
        return local.resolve()
    if local.exists():
        raise CheckpointError(f"{name} is a file", need="a model folder", hint="the folder that it lies in")
    if name == DEMO:
        from qengine.runtime.demo import demo_folder

        if revision is not None:
            raise ConfigError("--revision is for hub models", have="the demo model", hint="leave --revision out")
        return demo_folder(say)
    if not REPO.fullmatch(name) or name.startswith((".", "-")):
        raise CheckpointError(f"no such folder: {name}", hint="a local model folder, or a hub name such as owner/name")
    say(f"{name} is no local folder: asking the Hugging Face hub")
    return _snapshot(name, revision, pickled, config_only)


def resolve_tokenizer(name: str, *, config_only: bool = False) -> Path:
    """`resolve_folder` for --tokenizer, which its errors name; says nothing."""
    try:
        return resolve_folder(name, config_only=config_only)
    except UserError as e:
        raise CheckpointError(f"--tokenizer: {e}") from e


def _snapshot(name: str, revision: str | None, pickled: bool, config_only: bool) -> Path:
    from huggingface_hub import errors, model_info, snapshot_download

    at = f"{name}@{revision}" if revision else name
    try:
        info = model_info(name, revision=revision, timeout=20)
    except errors.GatedRepoError as e:
        raise CheckpointError(f"the hub asks for permission to download {at}", hint="`hf auth login`") from e
    except errors.RepositoryNotFoundError as e:
        raise CheckpointError(f"{name} is neither a local folder nor a model on the hub", hint=LOCAL_HINT) from e
    except errors.RevisionNotFoundError as e:
        raise CheckpointError(f"{name} has no revision {revision!r} on the hub", hint="leave --revision out") from e
    except Exception as e:  # out of reach; which exception depends on the hub client's HTTP library
        return _fetched_before(name, revision, e)
    files = [s.rfilename for s in info.siblings or []]
    wanted = ["*.json"] if config_only else _wanted(at, files, pickled)
    try:
        folder = snapshot_download(
            name, revision=revision, allow_patterns=wanted, ignore_patterns=list(UNWANTED), etag_timeout=20
        )
    except Exception as e:
        raise CheckpointError(
            f"{at} could not be downloaded: {_first_line(e)}", hint=f"try again; {LOCAL_HINT}"
        ) from e
    return Path(folder)


def _fetched_before(name: str, revision: str | None, cause: Exception) -> Path:
    """The snapshot that an earlier run left in the hub's cache; incomplete ones are caught when they are opened."""
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (errors.LocalEntryNotFoundError, OSError, ValueError) as e:
        raise CheckpointError(
            f"{name} is no local folder, the hub is out of reach ({_first_line(cause)}) and its cache has no copy",
            hint=LOCAL_HINT,
        ) from e


def _first_line(e: Exception) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0]


def _wanted(name: str, files: list[str], pickled: bool) -> list[str]:
    """Patterns of what to fetch; says before any download that a repository has no weights."""
    safe = any(file.endswith(".safetensors") for file in files)
    pickles = [file for file in PICKLED.names(files) if "/" not in file]
    if pickles and (pickled or not safe):
        return [p for p in WANTED if p != "*.safetensors"] + pickles
    if not safe:
        raise CheckpointError(
            f"{name} has no safetensors and no pickled weights on the hub", have=", ".join(files[:5]) or "no files"
        )
    return list(WANTED)
