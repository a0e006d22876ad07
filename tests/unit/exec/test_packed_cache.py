"""Packed weights on disk: the same numbers as packed in memory, whatever happens to the file, the disk or the neighbours."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from golden.small_models import cases, write_folder

_native = pytest.importorskip("kvseal._native", reason="the native part is not built")

from kvseal.core.errors import ModelCorrupt  # noqa: E402
from kvseal.exec.loader import load_model  # noqa: E402
from kvseal.exec.packed import PackedModel, pack_model  # noqa: E402
from kvseal.exec.weights import packed_cache  # noqa: E402
from kvseal.exec.weights.packed_cache import HEADER_BYTES, PackedCache  # noqa: E402
from kvseal.exec.weights.quants import BLOCK_SHAPES  # noqa: E402
from kvseal.exec.weights.types import ModelWeights, TensorSource  # noqa: E402

CASES = {str(case["name"]): case for case in cases()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose files have been left alone for a while."""
    write_folder(tmp_path / "model", CASES["llama-tied"])
    return tmp_path / "model"


@pytest.fixture
def cache(tmp_path: Path) -> PackedCache:
    return PackedCache(tmp_path / "packed", spare_bytes=0)


def outputs(model: PackedModel, columns: int = 64) -> np.ndarray:
    """What the output projection computes: depends on every byte of it."""
    x = np.random.default_rng(3).standard_normal((2, columns)).astype(np.float32)
    out = np.empty((2, model.lm_head.rows), dtype=np.float32)
    _native.linear(model.lm_head, x, out, None)
    return out


def the_file(cache: PackedCache) -> Path:
    (file,) = cache.directory.glob("*.packed")
    return file


def damage(file: Path, place: int, change: bytes) -> None:
    raw = bytearray(file.read_bytes())
    raw[place : place + len(change)] = change
    file.unlink()
    file.write_bytes(raw)
    file.chmod(0o444)


@pytest.mark.parametrize("weight_format", ["auto", "q4", "q8", "bf16"])
def test_mapped_weights_are_the_packed_ones(folder: Path, cache: PackedCache, weight_format: str) -> None:
    weights = load_model(folder)
    in_memory = pack_model(weights, weight_format)
    first, second = (pack_model(weights, weight_format, cache=cache, threads=2) for _ in range(2))
    assert in_memory.file is None and first.file == second.file == the_file(cache)
    for model in (first, second):
        assert (model.bytes, model.summary) == (in_memory.bytes, in_memory.summary)
        np.testing.assert_array_equal(outputs(model), outputs(in_memory))


def test_the_second_start_packs_nothing(folder: Path, cache: PackedCache, monkeypatch: pytest.MonkeyPatch) -> None:
    pack_model(load_model(folder), "q8", cache=cache)
    written = the_file(cache).stat()
    monkeypatch.setattr("kvseal.exec.packed._filled", None)  # Would raise.
    pack_model(load_model(folder), "q8", cache=cache)
    again = the_file(cache).stat()
    assert (again.st_ino, again.st_ctime_ns >= written.st_ctime_ns) == (written.st_ino, True)


def test_mapped_weights_cannot_be_written(folder: Path, cache: PackedCache) -> None:
    weights = load_model(folder)
    model = pack_model(weights, "q8", cache=cache)
    with pytest.raises(ValueError, match="read-only"):
        model.lm_head.fill(weights.embedding.raw, weights.embedding.type)
    slab = cache.find(the_file(cache).name, model.bytes)
    assert slab is not None and not slab.memory.flags.writeable


@pytest.mark.parametrize("place", [0, 9, 20, 50, HEADER_BYTES - 4000, HEADER_BYTES, HEADER_BYTES + 4097, -1])
def test_a_damaged_file_is_packed_again(folder: Path, cache: PackedCache, place: int, caplog: pytest.LogCaptureFixture) -> None:
    weights = load_model(folder)
    expected = outputs(pack_model(weights, "q8", cache=cache))
    file = the_file(cache)
    place = place % file.stat().st_size
    damage(file, place, bytes([file.read_bytes()[place] ^ 64]))
    damaged = file.read_bytes()
    with caplog.at_level(logging.WARNING):
        model = pack_model(weights, "q8", cache=cache)
    np.testing.assert_array_equal(outputs(model), expected)
    if place < packed_cache._HEADER.size + 32 or place >= HEADER_BYTES:  # The rest of the header is padding.
        assert "packed again" in caplog.text
        assert the_file(cache).read_bytes() != damaged
    assert model.file == file and cache.find(file.name, model.bytes) is not None


@pytest.mark.parametrize("size", [0, 100, HEADER_BYTES, -64, 64])
def test_a_file_of_another_size_is_packed_again(folder: Path, cache: PackedCache, size: int) -> None:
    weights = load_model(folder)
    expected = outputs(pack_model(weights, "q8", cache=cache))
    file = the_file(cache)
    raw = file.read_bytes()
    file.unlink()
    file.write_bytes(raw[:size] if size <= HEADER_BYTES and size != 64 else raw + bytes(64))
    model = pack_model(weights, "q8", cache=cache)
    np.testing.assert_array_equal(outputs(model), expected)
    assert the_file(cache).stat().st_size == len(raw)


def test_another_models_file_under_this_name_is_not_taken(folder: Path, tmp_path: Path, cache: PackedCache) -> None:
    """Same shapes, so same size and a sound digest: only the label in the header differs."""
    write_folder(tmp_path / "other", CASES["llama-tied"] | {"seed": 99})
    pack_model(load_model(tmp_path / "other"), "q8", cache=cache)
    foreign = the_file(cache)
    weights = load_model(folder)
    expected = outputs(pack_model(weights, "q8"))
    raw = foreign.read_bytes()
    foreign.unlink()
    pack_model(weights, "q8", cache=cache)
    own = the_file(cache)
    own.unlink()
    own.write_bytes(raw)
    np.testing.assert_array_equal(outputs(pack_model(weights, "q8", cache=cache)), expected)


def test_a_file_that_others_may_write_is_not_trusted(folder: Path, cache: PackedCache, caplog: pytest.LogCaptureFixture) -> None:
    weights = load_model(folder)
    pack_model(weights, "q8", cache=cache)
    the_file(cache).chmod(0o666)
    pack_model(weights, "q8", cache=cache)
    assert "somebody else" in caplog.text
    assert the_file(cache).stat().st_mode & 0o777 == 0o444


def settled_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModelWeights:
    """As if the files had been written long ago."""
    monkeypatch.setattr(packed_cache, "SETTLED_S", -1e9)
    return load_model(folder)


def test_a_change_that_the_sampled_digest_misses_is_seen(folder: Path, cache: PackedCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same size, same times of content: the time of change of status tells, and then the content."""
    monkeypatch.setattr("kvseal.exec.loader.weights_digest", lambda spec, checkpoint: bytes(32))
    weights = settled_model(folder, monkeypatch)
    pack_model(weights, "q8", cache=cache)
    file = folder / "model.safetensors"
    times = file.stat()
    raw = bytearray(file.read_bytes())
    embedding = load_model(folder).embedding.raw
    place = raw.find(embedding.tobytes()[:64]) + embedding.size // 2
    raw[place : place + 64] = bytes(64)
    time.sleep(0.02)  # A tick of the file system's clock.
    file.write_bytes(raw)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    changed = settled_model(folder, monkeypatch)
    model = pack_model(changed, "q8", cache=cache)
    np.testing.assert_array_equal(outputs(model), outputs(pack_model(changed, "q8")))
    assert len(list(cache.directory.glob("*.packed"))) == 2


def test_content_is_remembered_only_of_settled_files(folder: Path, cache: PackedCache, monkeypatch: pytest.MonkeyPatch) -> None:
    pack_model(load_model(folder), "q8", cache=cache)
    assert not list(cache.directory.glob("*.known"))  # Written a moment ago: a change in the same tick would not show.
    weights = settled_model(folder, monkeypatch)
    pack_model(weights, "q8", cache=cache)
    (known,) = cache.directory.glob("*.known")
    monkeypatch.setattr(packed_cache, "content_digest", None)  # Would raise.
    pack_model(weights, "q8", cache=cache)
    pack_model(weights, "q4", cache=cache)
    known.write_bytes(bytes(64))
    with pytest.raises(TypeError):
        pack_model(weights, "q8", cache=cache)


def test_a_copy_of_a_model_shares_the_file(folder: Path, tmp_path: Path, cache: PackedCache) -> None:
    write_folder(tmp_path / "copy", CASES["llama-tied"])
    files = {pack_model(load_model(path), "q8", cache=cache).file for path in (folder, tmp_path / "copy")}
    assert len(files) == 1


@pytest.mark.parametrize("obstacle", ["a file where the directory should be", "a full disk", "no links"])
def test_what_the_disk_refuses_costs_the_sharing_only(
    folder: Path, tmp_path: Path, obstacle: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = PackedCache(tmp_path / "packed", spare_bytes=0)
    if obstacle == "a file where the directory should be":
        cache.directory.write_text("")
    elif obstacle == "a full disk":
        cache = PackedCache(tmp_path / "packed", spare_bytes=2**62)
    else:
        monkeypatch.setattr(Path, "hardlink_to", lambda self, target: (_ for _ in ()).throw(PermissionError(1, "Operation not permitted")))
    weights = load_model(folder)
    model = pack_model(weights, "q8", cache=cache)
    np.testing.assert_array_equal(outputs(model), outputs(pack_model(weights, "q8")))
    if obstacle == "no links":
        assert model.file == the_file(cache)
    else:
        assert model.file is None
        assert len([record for record in caplog.records if "cannot keep them" in record.message]) == 1
        assert not cache.directory.is_dir() or not list(cache.directory.glob("*.part"))


def test_a_write_that_fails_half_way_leaves_nothing(
    folder: Path, cache: PackedCache, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert pack_model(load_model(folder), "q8", cache=cache).file is None
    assert "No space left" in caplog.text
    assert not list(cache.directory.iterdir())


def test_old_layouts_killed_writers_and_the_least_used_go(folder: Path, tmp_path: Path, cache: PackedCache) -> None:
    cache.directory.mkdir()
    old_layout = cache.directory / f"v{_native.PACK_LAYOUT - 1}-{'0' * 64}.packed"
    killed, at_work = cache.directory / "v1-dead.part", cache.directory / "v1-alive.part"
    foreign = cache.directory / "README"
    for file in (old_layout, killed, at_work, foreign):
        file.write_text("x")
    os.utime(killed, (1, 1))
    weights = load_model(folder)
    first = pack_model(weights, "q8", cache=cache)
    assert not old_layout.exists() and not killed.exists() and at_work.exists() and foreign.exists()
    small = PackedCache(cache.directory, keep_bytes=first.bytes + HEADER_BYTES + 1, spare_bytes=0)
    second = pack_model(weights, "q4", cache=small)
    assert the_file(cache) == second.file
    np.testing.assert_array_equal(outputs(first), outputs(pack_model(weights, "q8")))  # Still mapped, though unlinked.


def test_use_counts_as_use(folder: Path, cache: PackedCache) -> None:
    weights = load_model(folder)
    used, unused = (pack_model(weights, name, cache=cache).file for name in ("q8", "q4"))
    assert used is not None and unused is not None
    for file in (used, unused):
        os.utime(file, (1, 1))
    pack_model(weights, "q8", cache=cache)
    assert used.stat().st_mtime > 1 == unused.stat().st_mtime


def start(folder: Path, directory: Path, gate: object, answers: object) -> None:
    weights = load_model(folder)
    gate.wait()  # type: ignore[attr-defined]
    model = pack_model(weights, "q8", cache=PackedCache(directory, spare_bytes=0))
    file = None if model.file is None else model.file.stat().st_ino
    inode = next((int(line.split()[4]) for line in Path("/proc/self/maps").read_text().splitlines() if ".packed" in line), 0)
    answers.put((outputs(model).tobytes(), file, inode))  # type: ignore[attr-defined]


def test_processes_that_race_share_one_file(folder: Path, cache: PackedCache) -> None:
    context = multiprocessing.get_context("spawn")
    gate, answers = context.Barrier(2), context.Queue()
    processes = [context.Process(target=start, args=(folder, cache.directory, gate, answers)) for _ in range(2)]
    for process in processes:
        process.start()
    found = [answers.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    expected = outputs(pack_model(load_model(folder), "q8")).tobytes()
    assert {computed for computed, _, _ in found} == {expected}
    assert {mapped for _, _, mapped in found} == {the_file(cache).stat().st_ino}
    assert not list(cache.directory.glob("*.part"))


def warnings_of(folder: Path, cache: PackedCache, caplog: pytest.LogCaptureFixture) -> tuple[PackedModel, list[str]]:
    """What is packed is right whatever is in the way; and all that was said about it."""
    weights = load_model(folder)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        model = pack_model(weights, "q8", cache=cache)
    np.testing.assert_array_equal(outputs(model), outputs(pack_model(weights, "q8")))
    return model, [record.getMessage() for record in caplog.records]


def test_a_damaged_file_is_reported_once(folder: Path, cache: PackedCache, caplog: pytest.LogCaptureFixture) -> None:
    warnings_of(folder, cache, caplog)
    damage(the_file(cache), HEADER_BYTES, b"\xaa\x55\xaa")
    model, said = warnings_of(folder, cache, caplog)
    assert len(said) == 1 and "packed again: the weights in it are damaged" in said[0] and model.file == the_file(cache)


def test_a_folder_under_the_files_name_is_to_be_removed(folder: Path, cache: PackedCache, caplog: pytest.LogCaptureFixture) -> None:
    warnings_of(folder, cache, caplog)
    file = the_file(cache)
    file.unlink()
    file.mkdir()
    model, said = warnings_of(folder, cache, caplog)
    assert model.file is None and len(said) == 1 and f"{file} is a folder" in said[0] and said[0].endswith("remove it")
    assert not list(cache.directory.glob("*.part"))


@pytest.mark.timeout(60)
def test_a_named_pipe_under_the_files_name_is_replaced(folder: Path, cache: PackedCache, caplog: pytest.LogCaptureFixture) -> None:
    warnings_of(folder, cache, caplog)
    file = the_file(cache)
    file.unlink()
    os.mkfifo(file)
    model, said = warnings_of(folder, cache, caplog)
    assert len(said) == 1 and "named pipe" in said[0] and "packed again" in said[0]
    assert model.file == file and file.is_file()


@pytest.mark.parametrize(
    ("place", "remedy"),
    [
        ("file", "file is no folder; remove it, or set KVSEAL_CACHE"),
        ("file/below", "file is no folder; remove it, or set KVSEAL_CACHE"),
        ("circle/below", "circle is no folder; remove it, or set KVSEAL_CACHE"),
        ("x" * 300, "set KVSEAL_CACHE"),
    ],
)
def test_a_cache_that_cannot_be_is_told_once_with_the_remedy(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str, remedy: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "circle").symlink_to("circle")
    model, said = warnings_of(folder, PackedCache(tmp_path / place, spare_bytes=0), caplog)
    assert model.file is None and len(said) == 1 and remedy in said[0] and "packed again" not in said[0]


def test_a_closed_cache_is_told_once(
    folder: Path, cache: PackedCache, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(packed_cache, "open_file", denied)
    monkeypatch.setattr(Path, "mkdir", denied)
    monkeypatch.setattr(os, "access", lambda *_: False)  # As for anybody but root.
    model, said = warnings_of(folder, cache, caplog)
    assert model.file is None and len(said) == 1 and "Permission denied; set KVSEAL_CACHE" in said[0]


def test_a_full_disk_says_how_much_to_free(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, said = warnings_of(folder, PackedCache(tmp_path / "packed", spare_bytes=2**62), caplog)
    assert len(said) == 1 and "MiB there, or set KVSEAL_CACHE" in said[0] and "; free " in said[0]


def test_a_folder_where_content_is_remembered_leaves_nothing_behind(
    folder: Path, cache: PackedCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packed_cache, "SETTLED_S", -1e9)
    warnings_of(folder, cache, caplog)
    (known,) = cache.directory.glob("*.known")
    known.unlink()
    known.mkdir()
    for _ in range(3):
        warnings_of(folder, cache, caplog)
    assert not list(cache.directory.glob("*.part"))


BROKEN = {"NaN": float("nan"), "infinity": float("inf"), "minus infinity": -float("inf")}


@pytest.mark.parametrize("weight_format", ["auto", "fp32", "bf16", "q8", "q4"])
@pytest.mark.parametrize("value", BROKEN)
def test_a_matrix_that_is_not_finite_is_refused(folder: Path, cache: PackedCache, weight_format: str, value: str) -> None:
    weights = load_model(folder)
    columns = weights.layers[1].down.columns
    raw = weights.layers[1].down.to_float32()
    raw[-1, columns - 2] = BROKEN[value]
    broken = TensorSource(raw.reshape(-1).view(np.uint8), "F32", raw.shape)
    layers = (weights.layers[0], replace(weights.layers[1], down=broken), *weights.layers[2:])
    with pytest.raises(ModelCorrupt, match="down projection of layer 1 holds values that are not finite"):
        pack_model(replace(weights, layers=layers), weight_format, cache=cache, threads=2)
    assert not list(cache.directory.glob("*.packed"))


@pytest.mark.parametrize(
    ("kind", "packing"), [("Q8_0", "q8"), ("Q4_0", "q4"), ("Q4_1", "q4m"), ("Q5_1", "q8m"), ("Q4_K", "q4m"), ("Q6_K", "q8")]
)
def test_stored_scales_that_are_not_finite_are_seen(kind: str, packing: str) -> None:
    elements, size = BLOCK_SHAPES[kind]
    at = size - 2 if kind == "Q6_K" else 0
    for scale, is_finite in ((b"\x00\x3c", True), (b"\x00\x7c", False), (b"\x00\xfc", False), (b"\x01\x7e", False)):
        raw = np.zeros((8, size), dtype=np.uint8)
        raw[:, 192 if kind == "Q6_K" else size - 3] = 1
        raw[:, 4 if kind == "Q4_K" else size - 4] |= 1
        raw[5, at : at + 2] = np.frombuffer(scale, dtype=np.uint8)
        slab = _native.WeightSlab(_native.packed_bytes(packing, 8, elements))
        assert slab.place(8, elements, packing).fill(raw.reshape(-1), kind) is is_finite
