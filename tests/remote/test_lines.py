from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_flows.remote.lines import LineStream
from gpu_flows.remote.masking import Masker


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def lines_of(data: bytes, chunk: int = 1 << 20, **options) -> list[str]:
    stream = LineStream(**{"clock": Clock()} | options)
    out = [line for at in range(0, len(data), chunk) for line in stream.feed(data[at : at + chunk])]
    return out + stream.close()


def test_c31_a_character_cut_at_a_chunk_boundary_and_a_truly_bad_byte():
    text = "x" * 4095 + "é" + "漢" * 70_000
    data = text.encode() + b"\xff\nafter\n"
    for chunk in (4096, 4097, 65_536):
        lines = lines_of(data, chunk)
        assert lines.pop() == "after"
        assert "".join(lines) == text + "�"
        assert max(map(len, lines)) <= 4096 + 256


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]))), st.integers(1, 50))
def test_plain_lines_come_out_as_they_are_however_they_are_cut(texts, chunk):
    texts = [text for text in texts if "\x1b" not in text]
    data = "".join(text + "\n" for text in texts).encode()
    assert lines_of(data, chunk) == texts


@settings(max_examples=200)
@given(st.binary(max_size=300), st.integers(1, 20))
def test_any_bytes_give_printable_lines(data, chunk):
    for line in lines_of(data, chunk, line_chars=16):
        assert not any((ord(c) < 32 and c != "\t") or 127 <= ord(c) < 160 for c in line)
        assert len(line) <= 16


@pytest.mark.parametrize("chunk", [1, 2, 3, 1000])
def test_line_ends(chunk):
    data = b"one\r\ntwo\n\nthree\x0b\xe2\x80\xa8still\nlast"
    assert lines_of(data, chunk) == ["one", "two", "", "three\u2028still", "last"]


@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.parametrize(
    ("raw", "seen"),
    [
        ("\x1b[31mred\x1b[0m \x1b[1;38;5;200mbold\x1b[m", "red bold"),
        ("\x1b]0;title\x07text\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "textlink"),
        ("a\x1b(Bb\x1bMc\x1b[?25lx\x1b[2Ky", "abcxy"),
        ("\x1bP1;2|secret stuff\x1b\\after", "after"),
        ("\x9b31mred\x9b0m", "red"),
        ("bell\x07 nul\x00 tab\t.", "bell nul tab\t."),
        ("12%\x08\x08\x0815%", "15%"),
        ("\x08\x08x", "x"),
        ("lone \x1b", "lone "),
    ],
)
def test_terminal_codes_are_stripped(raw, seen, chunk):
    assert lines_of(raw.encode() + b"\n", chunk) == [seen]


def test_a_colour_code_in_an_endless_line_is_not_cut_in_two():
    data = ("\x1b[31m" + "ab" * 3 + "\x1b[0m") * 500
    lines = lines_of(data.encode() + b"\n", 7, line_chars=300)
    assert "".join(lines) == "ab" * 1500


# Progress bars.


def tqdm_bar(total: int) -> bytes:
    return b"".join(
        b"\r%3d%%|" % (100 * n // total) + "█".encode() * 3 + b"| %d/%d" % (n, total)
        for n in range(total + 1)
    )


@pytest.mark.parametrize("chunk", [1, 5, 100_000])
def test_u09_of_a_progress_bar_the_last_state_is_kept(chunk):
    lines = lines_of(b"start\n" + tqdm_bar(500) + b"\nend\n", chunk)
    assert lines[0] == "start"
    assert lines[-2:] == ["100%|███| 500/500", "end"]
    assert len(lines) <= 4


def test_u09_a_bar_is_shown_now_and_then_though_no_line_ends():
    clock = Clock()
    stream = LineStream(clock=clock, progress_per_s=0.5)
    shown = []
    for n in range(100):
        clock.now = n * 0.1
        shown += stream.feed(b"\r%d/100" % n)
    assert len(shown) == 5
    assert shown[0] == "0/100"
    clock.now += 100
    assert stream.tick() == ["99/100"]
    assert stream.tick() == []
    assert stream.close() == ["99/100"]


def test_u09_bars_that_move_the_cursor_up_are_no_flood_of_lines():
    # tqdm with position 1: a line feed down, the bar, the cursor up again.
    clock = Clock()
    stream = LineStream(clock=clock)
    shown = []
    for n in range(1000):
        clock.now = n * 0.01
        shown += stream.feed(b"\router %d" % (n // 10))
        shown += stream.feed(b"\n\rinner %d\x1b[A" % n)
    assert 10 <= len(shown) <= 25
    assert {line.split()[0] for line in shown} == {"outer", "inner"}
    clock.now += 1
    rest = stream.feed(b"\n\n\nTraceback (most recent call last):\nboom\n") + stream.close()
    assert rest[-2:] == ["Traceback (most recent call last):", "boom"]
    assert "inner 999" in rest


def test_u09_eight_ranks_ten_updates_a_second_for_a_minute():
    clock = Clock()
    streams = [LineStream(clock=clock) for _ in range(8)]
    shown = [[] for _ in streams]
    for n in range(600):
        clock.now = n * 0.1
        for rank, stream in enumerate(streams):
            shown[rank] += stream.feed(f"\r\x1b[3{rank}mrank {rank}: step {n}\x1b[0m\x1b[K".encode())
    for rank, stream in enumerate(streams):
        shown[rank] += stream.feed(b"\n") + stream.close()
        assert 55 <= len(shown[rank]) <= 65
        assert shown[rank][-1] == f"rank {rank}: step 599"


def test_a_line_that_overwrites_a_bar_is_a_line():
    assert lines_of(b"\r10%\r         \rsaved checkpoint\n\r20%\n", 4)[-2:] == ["saved checkpoint", "20%"]


# Floods.


def test_without_a_limit_no_line_is_dropped():
    data = b"".join(b"%d\n" % n for n in range(50_000))
    assert lines_of(data, 1000) == [str(n) for n in range(50_000)]


def test_a_flood_is_cut_and_says_by_how_much_and_ends_with_its_last_lines():
    clock = Clock()
    stream = LineStream(clock=clock, flood_lines_per_s=100)
    out = stream.feed(b"".join(b"%d\n" % n for n in range(1000)))
    assert out == [str(n) for n in range(100)]
    clock.now = 1.5
    assert stream.tick() == [
        "[880 lines left out; the raw log has them]",
        *(str(n) for n in range(980, 1000)),
    ]
    assert stream.feed(b"calm\n") == ["calm"]
    out = stream.feed(b"".join(b"%d\n" % n for n in range(1000))) + stream.feed(
        b"Traceback\nValueError: no\n"
    )
    out += stream.close()
    assert out[-2:] == ["Traceback", "ValueError: no"]
    assert "[883 lines left out; the raw log has them]" in out


def test_few_lines_too_many_are_all_shown():
    stream = LineStream(clock=Clock(), flood_lines_per_s=5)
    assert stream.feed(b"1\n2\n3\n4\n5\n6\n7\n") + stream.close() == list("1234567")


# Secrets.


def test_secrets_are_masked_across_chunks_colours_and_pieces():
    secret = "hf_inventedA1"
    masker = Masker({"TOKEN": secret})
    chance = random.Random(1)
    data = f"a {secret} b\n\x1b[1mhf_inv\x1b[0mentedA1\n{'x' * 4090}{secret}\n".encode()
    for _ in range(50):
        stream = LineStream(masker=masker, clock=Clock())
        out, at = [], 0
        while at < len(data):
            size = chance.randint(1, 30)
            out += stream.feed(data[at : at + size])
            at += size
        assert "".join(out + stream.close()) == f"a *** b***{'x' * 4090}***"
