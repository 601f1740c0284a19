"""Texts that others wrote, as they are shown."""

from __future__ import annotations


def printable(text: str) -> str:
    """A text whose control characters, but line ends and tabs, are written as Python escapes them.

    A terminal obeys such characters: what a registry or a program said could otherwise change what is shown.
    """
    return "".join(letter if letter.isprintable() or letter in "\n\t" else repr(letter)[1:-1] for letter in text)


def one_line(text: str) -> str:
    """``printable``, in one line: what came from the network cannot pretend to be lines of ours."""
    return printable(" ".join(text.split()))
