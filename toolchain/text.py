"""Escape text from programs and the network before it is printed."""

from __future__ import annotations


def printable(text: str) -> str:
    """Escape all control characters except line ends and tabs, in Python's notation.

    A terminal interprets control characters: the output of a registry or a program could change the display.
    """
    return "".join(letter if letter.isprintable() or letter in "\n\t" else repr(letter)[1:-1] for letter in text)


def one_line(text: str) -> str:
    """As ``printable``, on one line: text from the network cannot imitate lines of our own output."""
    return printable(" ".join(text.split()))
