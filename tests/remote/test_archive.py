from __future__ import annotations

import asyncio
import io
import os
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_flows.remote.archive import Unpacker, gzipped, in_thread, pack
from gpu_flows.remote.tree import is_within, pack_manifest, scan_tree, unpack_manifest

file_names = st.text(
    st.characters(blacklist_characters="/\0", blacklist_categories=["Cs"]), min_size=1, max_size=40
).filter(
    lambda name: name not in (".", "..") and len(name.encode()) < 200 and not name.endswith((".pyc", ".pyo"))
)
paths = st.lists(file_names, min_size=1, max_size=4).map("/".join)
trees = st.dictionaries(paths, st.tuples(st.binary(max_size=2000), st.booleans()), max_size=8).filter(
    lambda tree: not any(a != b and b.startswith(f"{a}/") for a in tree for b in tree)
)


def build(folder, tree, order=1, time=0):
    for name, (content, executable) in list(tree.items())[::order]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o755 if executable else 0o640)
        os.utime(path, (time, time))
    return scan_tree(folder)


@settings(deadline=None, max_examples=30)
@given(trees)
def test_the_same_tree_is_the_same_archive_wherever_and_whenever(tree):
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        first = build(Path(one), tree)
        second = build(Path(other), tree, order=-1, time=10**9)
        assert first.digest == second.digest
        packed = b"".join(pack(first.root, first.entries, {}))
        assert packed == b"".join(pack(second.root, second.entries, {}))
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            for member in archive:
                content, executable = tree[member.name]
                assert archive.extractfile(member).read() == content
                assert bool(member.mode & 0o111) == executable
                assert (member.uid, member.gid, member.uname, member.gname) == (0, 0, "", "")
                assert member.mtime > 315532800  # zip files begin in 1980


@settings(deadline=None, max_examples=30)
@given(trees, trees)
def test_the_digest_tells_trees_apart(tree, other):
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        assert (build(Path(one), tree).digest == build(Path(two), other).digest) == (tree == other)


@settings(deadline=None, max_examples=30)
@given(trees)
def test_a_manifest_survives_its_way(tree):
    with tempfile.TemporaryDirectory() as folder:
        scanned = build(Path(folder), tree)
    back = unpack_manifest(scanned.manifest)
    assert pack_manifest(back) == scanned.manifest


@given(st.binary(max_size=100))
def test_no_manifest_of_a_box_names_a_path_outside(blob):
    for manifest in (blob, b"f\0\0" + blob + b"\0"):
        try:
            entries = unpack_manifest(manifest)
        except ValueError:
            continue
        assert all(is_within(entry.path) for entry in entries)


FORMATS = {"gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT, "ustar": tarfile.USTAR_FORMAT}


@pytest.mark.parametrize("form", FORMATS)
@settings(deadline=None, max_examples=25)
@given(
    contents=st.dictionaries(file_names, st.binary(max_size=3000), max_size=5),
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=5),
    copies=st.integers(1, 2),
)
def test_what_other_tars_pack_is_unpacked_whatever_the_chunks(form, contents, sizes, copies):
    """GNU's, BSD's and busybox's tar write different headers; a stream is cut anywhere."""
    stream = b""
    for _ in range(copies):  # xargs may start tar several times
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=FORMATS[form], encoding="utf-8") as archive:
            for name, content in contents.items():
                info = tarfile.TarInfo(f"./{name}")
                info.size = len(content)
                try:
                    archive.addfile(info, io.BytesIO(content))
                except ValueError:
                    return  # too long a name for ustar
        stream += out.getvalue()

    async def chunks():
        at = n = 0
        while at < len(stream):
            size = sizes[n % len(sizes)]
            yield stream[at : at + size]
            at += size
            n += 1

    with tempfile.TemporaryDirectory() as folder:
        arrived = []
        targets = {f"./{name}": Path(folder) / str(n) for n, name in enumerate(contents)}
        assert asyncio.run(Unpacker(targets, 1 << 30, arrived.append).consume(chunks())) == ""
        assert {file.name: file.path.read_bytes() for file in arrived} == {
            f"./{name}": content for name, content in contents.items()
        }
        assert len(os.listdir(folder)) == len(contents)


@given(st.lists(st.binary(max_size=5000), max_size=10))
def test_batches_and_compression_keep_the_bytes(blocks):
    import gzip

    async def gather(source):
        return b"".join([part async for part in in_thread(source)])

    assert asyncio.run(gather(iter(blocks))) == b"".join(blocks)
    assert gzip.decompress(asyncio.run(gather(gzipped(blocks)))) == b"".join(blocks)
