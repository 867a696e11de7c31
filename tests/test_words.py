"""Numbers as people read them."""

from __future__ import annotations

from jaxpar.words import bytes_text, duration, short, shortened


def test_numbers_are_short_and_have_units():
    assert [short(n) for n in (0, 512, 20_480, 1.5e6, 2e9, 1e12)] == ["0", "512", "20.48k", "1.5M", "2B", "1T"]
    assert [bytes_text(n) for n in (12, 31_896_128, 999.6e6, 2.9e9)] == ["12 B", "31.9 MB", "1,000 MB", "2.9 GB"]
    times = [duration(s) for s in (0.04, 59.96, 200, 3720, 200_000)]
    assert times == ["0.0 s", "1 min 00 s", "3 min 20 s", "1 h 02 min", "2 d 07 h"]
    assert shortened("abcdefghij", 5) == "ab…ij" and shortened("abc", 5) == "abc"
