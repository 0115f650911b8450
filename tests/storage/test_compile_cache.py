"""An entry is what was put, or none; nothing that lies in the folder stops a job."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from autopar.storage.compile_cache import CompileCache

TENSORS = [torch.arange(6.0).reshape(2, 3), torch.tensor(True), torch.zeros(0, 2), torch.randn(3, 4).bfloat16()[:, ::2]]


def test_what_was_put_is_there(tmp_path):
    cache = CompileCache(tmp_path / "new" / "folder")
    assert cache.get("a") is None
    cache.put("a", "text \u00e4 \N{SNOWMAN}", TENSORS)
    text, tensors = cache.get("a")
    assert text == "text \u00e4 \N{SNOWMAN}" and cache.get("b") is None
    assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(tensors, TENSORS, strict=True))
    cache.put("a", "other")
    assert cache.get("a") == ("other", []) and os.stat(tmp_path / "new" / "folder").st_mode & 0o077 == 0


@pytest.mark.parametrize("at", [0, 9, 40, -40, -1])
def test_a_damaged_entry_is_none(tmp_path, at):
    cache = CompileCache(tmp_path)
    cache.put("a", "text", TENSORS)
    (file,) = tmp_path.iterdir()
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    found = cache.get("a")
    assert found is None or found[0] == "text" and torch.equal(found[1][0], TENSORS[0])
    file.write_bytes(data[:-7])
    assert cache.get("a") is None
    cache.put("a", "again")
    assert cache.get("a") == ("again", [])


def test_an_entry_under_another_name_is_none(tmp_path):
    cache = CompileCache(tmp_path)
    cache.put("a", "text")
    (file,) = tmp_path.iterdir()
    os.rename(file, cache._path(tmp_path, "b"))
    assert cache.get("b") is None


def test_the_oldest_go(tmp_path):
    cache = CompileCache(tmp_path, limit_bytes=10_000)
    for at, key in enumerate("abc"):
        cache.put(key, key * 3_000)
        os.utime(cache._path(tmp_path, key), (at, at))
    assert cache.get("a") is not None  # used, and so the youngest
    cache.put("d", "d" * 3_000)
    assert [cache.get(key) is not None for key in "abcd"] == [True, False, True, True]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    cache = CompileCache(tmp_path / "file" / "folder")
    cache.put("a", "text")
    assert cache.get("a") is None


def test_jobs_share_a_folder(tmp_path):
    texts = {str(i): str(i) * 50_000 for i in range(4)}
    seen, stop = [], threading.Event()

    def read():
        while not stop.is_set():
            seen.append(CompileCache(tmp_path).get("a"))

    def write(text):
        for _ in range(20):
            CompileCache(tmp_path).put("a", text)

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(text,)) for text in texts.values()]
    reader.start()
    for w in writers:
        w.start()
    for w in writers:
        w.join(60)
    stop.set()
    reader.join(60)
    assert {found[0] for found in seen if found is not None} <= {*texts.values()}
    assert [f.name for f in tmp_path.iterdir() if "unfinished" in f.name] == []


@pytest.mark.parametrize(
    "said, folder", [("off", None), ("0", None), ("/x/y", "/x/y"), (None, "/home/me/.cache/autopar")]
)
def test_where_it_is(monkeypatch, said, folder):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("AUTOPAR_CACHE", raising=False)
    if said is not None:
        monkeypatch.setenv("AUTOPAR_CACHE", said)
    cache = CompileCache.of_environment()
    assert (cache.folder and str(cache.folder)) == folder
