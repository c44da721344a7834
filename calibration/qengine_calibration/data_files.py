"""From what --data names to a file: a local .txt, .jsonl or .parquet file, or one of a data set on the hub."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from qengine.errors import ConfigError

SUFFIXES = (".parquet", ".jsonl", ".txt")
"""The kinds that are read; of a data set's files, the first kind that it has."""
NOT_DATA = ("readme", "license", "notice", "requirements")
CONVERTED = "refs/convert/parquet"
"""The branch in which the hub keeps a copy of most data sets as parquet."""
DATA_SET = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<file>.+))?")
NEED = "a .txt, .jsonl or .parquet file, or a data set on the hub such as owner/name or owner/name:folder/file.parquet"

Say = Callable[[str], None]


def find_data(name: str, say: Say = lambda line: None) -> tuple[Path, str]:
    """The file and its name for reports. Raises ConfigError with one line: what was tried, and what would work."""
    path = Path(name).expanduser()
    if path.is_dir():
        raise ConfigError("--data", have=f"the folder {name}", need=NEED)
    found = DATA_SET.fullmatch(name)
    if path.exists() or found is None or (path.suffix in SUFFIXES and not found["file"]):
        return path, name
    say(f"{name} is no local file: asking the Hugging Face hub")
    return _from_hub(found["name"], found["file"], say)


def require_parquet() -> None:
    """Raise ConfigError where the reader of .parquet isn't installed."""
    if find_spec("pyarrow") is None:
        raise ConfigError(
            "reading .parquet needs pyarrow, which is not installed",
            hint="pip install 'qengine-llm[parquet]', or a .jsonl or .txt file",
        )


def _from_hub(name: str, file: str | None, say: Say) -> tuple[Path, str]:
    from huggingface_hub import errors, hf_hub_download, list_repo_files

    revision = None
    try:
        files = list_repo_files(name, repo_type="dataset")
        chosen = file or choose(files)
        if chosen is None:
            revision = CONVERTED
            chosen = choose(_converted(name))
    except errors.GatedRepoError as e:
        raise ConfigError(f"the hub asks for permission to download {name}", hint="`hf auth login`") from e
    except errors.RepositoryNotFoundError as e:
        raise ConfigError(f"{name} is neither a local file nor a data set on the hub", need=NEED) from e
    except Exception as e:  # out of reach; which exception depends on the hub client's HTTP library
        raise ConfigError(f"{name} is no local file, and the hub is out of reach ({_line(e)})", need=NEED) from e
    if chosen is None or (file is not None and file not in files):
        have = ", ".join(files[:6]) or "no files"
        raise ConfigError(f"{name} has no {file or 'file that is read here'}", have=have, need=" | ".join(SUFFIXES))
    if chosen.endswith(".parquet"):
        require_parquet()
    say(f"--data: {chosen} of {name}")
    try:
        path = hf_hub_download(name, chosen, repo_type="dataset", revision=revision)
    except Exception as e:
        raise ConfigError(f"{name}: {chosen} could not be downloaded: {_line(e)}", hint="try again") from e
    return Path(path), f"{name}:{chosen}"


def _converted(name: str) -> list[str]:
    from huggingface_hub import errors, list_repo_files

    try:
        return list(list_repo_files(name, repo_type="dataset", revision=CONVERTED))
    except (errors.RevisionNotFoundError, errors.EntryNotFoundError):
        return []


def choose(files: Sequence[str]) -> str | None:
    """The file of a data set that is read when none is named: the first with "train" in its path, else the first."""
    for suffix in SUFFIXES:
        own = sorted(f for f in files if f.endswith(suffix) and not Path(f).stem.lower().startswith(NOT_DATA))
        if own:
            return next((f for f in own if "train" in f.lower()), own[0])
    return None


def _line(e: Exception) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0]
