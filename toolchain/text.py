"""Escape text from programs and the network before it is printed."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return text in which unprintable characters, except line ends and tabs, are escaped in Python's notation.

    A terminal interprets control characters and bidirectional formatting characters, so the output of a registry or a
    program could change the display.
    """
    return "".join(letter if letter.isprintable() or letter in "\n\t" else repr(letter)[1:-1] for letter in text)


def one_line(text: str) -> str:
    """Return text as ``printable`` does, but on one line, so that the text cannot imitate other lines of output."""
    return printable(" ".join(text.split()))
