from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_flows.remote.masking import Masker


def streamed(masker: Masker, data: bytes, sizes: list[int]) -> bytes:
    stream = masker.stream()
    out, at = b"", 0
    for size in [*sizes, len(data)]:
        out += stream.feed(data[at : at + size])
        at += size
        assert stream.held <= max(map(len, masker._patterns), default=1)
    return out + stream.finish()


@pytest.mark.parametrize(
    ("secrets", "text", "masked"),
    [
        ({"A": "s3cret"}, "a s3cret b s3crets3cret", "a *** b ******"),
        ({"A": "abcd", "B": "cdef"}, "xabcdefx", "x***x"),
        ({"A": "abcd", "B": "abcdefgh"}, "abcdefgh abcdef", "*** ***ef"),
        ({"A": "aaaa"}, "b" + "a" * 50 + "b aaa", "b***b aaa"),
        ({"A": "pässwörd漢"}, "ä pässwörd漢 ö", "ä *** ö"),
        ({"A": "x" * 5}, "", ""),
        ({}, "nothing", "nothing"),
    ],
)
def test_values_are_masked_wherever_the_chunks_end(secrets, text, masked):
    masker = Masker(secrets)
    assert masker.mask(text) == masked
    data = text.encode()
    for size in range(1, len(data) + 1):
        assert streamed(masker, data, [size] * (len(data) // size)) == masked.encode()


@given(
    st.lists(st.text("ab", min_size=4, max_size=7), min_size=1, max_size=3),
    st.text("abc", max_size=60),
    st.lists(st.integers(1, 9), max_size=20),
)
def test_a_stream_masks_as_the_whole_does(values, text, sizes):
    masker = Masker({str(n): value for n, value in enumerate(values)})
    whole = masker.mask(text)
    assert streamed(masker, text.encode(), sizes) == whole.encode()
    assert not any(value in whole for value in values)


def test_each_line_of_a_value_of_several_is_masked_by_itself():
    key = "-----BEGIN KEY-----\nc2VjcmV0IGtleQ==\nbW9yZSBvZiBpdA==\n}\n-----END KEY-----\n"
    masker = Masker({"KEY": key})
    assert masker.mask(f"<{key}>") == "<***>"
    logged = "".join(f"[rank0]: {line}\n" for line in key.splitlines())
    assert masker.mask(logged) == "[rank0]: ***\n[rank0]: ***\n[rank0]: ***\n[rank0]: }\n[rank0]: ***\n"


def test_other_spellings_are_masked_too():
    value = 'p@ss "word"\n\\x漢'
    masker = Masker({"A": value})
    for spelling in (json.dumps(value), repr(value), "postgres://u:p%40ss%20%22word%22%0A%5Cx%E6%BC%A2@h/x"):
        assert "ss" not in masker.mask(spelling).replace("***", "").replace("postgres", "")


def test_short_values_are_left_alone_and_named():
    masker = Masker({"PIN": "123", "EMPTY": "", "TOKEN": "1234"})
    assert masker.mask("123 1234") == "123 ***"
    assert masker.notes == (
        "the value of PIN is too short to be masked in logs",
        "the value of EMPTY is too short to be masked in logs",
    )


def test_c51_no_repr_shows_a_value():
    assert "s3cret" not in repr(Masker({"A": "s3cret"}))
