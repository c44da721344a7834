"""From a name to a folder: local ones as they are, hub ones through the hub client, one clear line otherwise."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors

from qengine.config import EngineConfig
from qengine.errors import CheckpointError, ConfigError
from qengine.prepare import prepare_model
from qengine.runtime import demo
from qengine.runtime.hub import UNWANTED, WANTED, resolve_folder


def offline(*args: object, **options: object) -> object:
    raise ConnectionError("Name or service not known")


def missing(kind: type[Exception]) -> object:
    def fail(*args: object, **options: object) -> object:
        raise kind.__new__(kind)

    return fail


def test_a_local_folder_needs_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "model_info", offline)
    assert resolve_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "a/b/c", "../x", "no way"])
def test_what_can_be_no_hub_name_is_a_missing_folder(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "model_info", lambda *a, **o: pytest.fail("the hub was asked"))
    with pytest.raises(CheckpointError, match="no such folder"):
        resolve_folder(name)


def test_demo_is_the_demo_model_unless_a_folder_has_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "demo_folder", lambda say: tmp_path / "cached")
    monkeypatch.chdir(tmp_path)
    assert resolve_folder("demo") == tmp_path / "cached"
    with pytest.raises(ConfigError, match="--revision is for hub models; have: the demo model"):
        resolve_folder("demo", revision="main")
    (tmp_path / "demo").mkdir()
    assert resolve_folder("demo") == tmp_path / "demo"


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is a file"):
        resolve_folder(str(tmp_path / "model.safetensors"))


def test_out_of_reach_says_so_and_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "model_info", offline)
    said: list[str] = []
    with pytest.raises(CheckpointError) as e:
        resolve_folder("owner/name", say=said.append)
    text = str(e.value)
    assert "out of reach (Name or service not known)" in text and "a local model folder works" in text
    assert "\n" not in text and said == ["owner/name is no local folder: asking the Hugging Face hub"]


def test_out_of_reach_uses_what_was_fetched_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(name: str, *, revision: str | None, local_files_only: bool) -> str:
        assert local_files_only
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "model_info", offline)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_folder("owner/name") == tmp_path


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (errors.RepositoryNotFoundError, "neither a local folder nor a model on the hub"),
        (errors.RevisionNotFoundError, "no revision 'v2'"),
        (errors.GatedRepoError, "asks for permission"),
    ],
    ids=["missing", "revision", "gated"],
)
def test_the_hub_says_no(kind: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "model_info", missing(kind))
    with pytest.raises(CheckpointError, match=text):
        resolve_folder("owner/name", revision="v2")


def test_a_repository_without_weights_is_refused_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [SimpleNamespace(rfilename=f) for f in ("config.json", "training_args.bin", "onnx/model.bin")]
    monkeypatch.setattr(huggingface_hub, "model_info", lambda *a, **o: SimpleNamespace(siblings=files))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **o: pytest.fail("fetched"))
    with pytest.raises(CheckpointError, match="no safetensors and no pickled weights"):
        resolve_folder("owner/name")


@pytest.mark.parametrize(
    "names, pickled, fetched",
    [
        (["pytorch_model.bin"], False, ["pytorch_model.bin"]),
        (["model.safetensors", "pytorch_model.bin"], False, ["*.safetensors"]),
        (["model.safetensors", "pytorch_model.bin"], True, ["pytorch_model.bin"]),
        (["model.safetensors"], True, ["*.safetensors"]),
        (["a-00001-of-00002.bin", "a-00002-of-00002.bin", "optimizer.pt", "x/y.bin"], False,
         ["a-00001-of-00002.bin", "a-00002-of-00002.bin"]),
    ],
)  # fmt: skip
def test_pickles_are_fetched_where_they_count(
    names: list[str], pickled: bool, fetched: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, object] = {}
    files = [SimpleNamespace(rfilename=name) for name in names]
    monkeypatch.setattr(huggingface_hub, "model_info", lambda *a, **o: SimpleNamespace(siblings=files))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **o: asked.update(o) or str(tmp_path))
    resolve_folder("owner/name", pickled=pickled)
    assert [p for p in asked["allow_patterns"] if p not in WANTED or p == "*.safetensors"] == fetched


def test_only_model_files_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def snapshot(name: str, **options: object) -> str:
        asked.update(options)
        return str(tmp_path)

    files = [SimpleNamespace(rfilename="model.safetensors")]
    monkeypatch.setattr(huggingface_hub, "model_info", lambda *a, **o: SimpleNamespace(siblings=files))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_folder("owner/name", revision="main") == tmp_path
    assert asked["allow_patterns"] == list(WANTED) and asked["ignore_patterns"] == list(UNWANTED)
    assert not [p for p in WANTED if p.endswith((".bin", ".pt", ".pth", ".py"))]


def test_a_plan_fetches_nothing_but_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a repository whose weights serving would not read."""
    asked: list[list[str]] = []

    def snapshot(name: str, *, allow_patterns: list[str], **options: object) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    files = [SimpleNamespace(rfilename=name) for name in ("config.json", "model.gguf")]
    monkeypatch.setattr(huggingface_hub, "model_info", lambda *a, **o: SimpleNamespace(siblings=files))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_folder("owner/name", config_only=True) == tmp_path and asked == [["*.json"]]
    with pytest.raises(CheckpointError, match="no safetensors"):
        resolve_folder("owner/name")


def test_a_tokenizer_that_is_not_there_is_said_of_its_flag(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^--tokenizer: no such folder: /no/such"):
        prepare_model(EngineConfig(model=str(tmp_path), tokenizer="/no/such"), lambda line: None)
