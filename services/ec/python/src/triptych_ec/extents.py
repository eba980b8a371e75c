"""The size of an item in its own units, from which a reader derives the positions of its rows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

_U32 = (1 << 32) - 1
_U64 = (1 << 64) - 1
_INTEGER = re.compile(r"[0-9]{1,20}", re.ASCII)
_NUMBER = re.compile(r"-?[0-9]{1,400}(\.[0-9]{1,1100})?", re.ASCII)


@dataclass(frozen=True)
class Grid:
    """An image as a grid of patches before merging."""

    t: int
    h: int
    w: int

    def __str__(self) -> str:
        return f"grid {self.t} {self.h} {self.w}"


@dataclass(frozen=True)
class Windows:
    """An audio clip as windows; `spans` are start and end of each in milliseconds, or empty for contiguous windows."""

    n_windows: int
    duration_ms: int
    spans: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        spans = "".join(f" {start}-{end}" for start, end in self.spans)
        return f"windows {self.n_windows} {self.duration_ms}{spans}"


@dataclass(frozen=True)
class Tokens:
    """Encoder text."""

    def __str__(self) -> str:
        return "tokens"


@dataclass(frozen=True)
class Video:
    """A video as a grid of patches before merging, with the times of its sampled frames in seconds."""

    t: int
    h: int
    w: int
    interval: float
    times: tuple[float, ...]

    def __str__(self) -> str:
        times = "".join(f" {_seconds_text(time)}" for time in self.times)
        return f"video {self.t} {self.h} {self.w} {_seconds_text(self.interval)}{times}"


Extent = Grid | Windows | Tokens | Video


def parse_extent(text: str) -> Extent | None:
    """Reads an extent; `None` for a text that is none."""
    try:
        return _parse(text.split(" "))
    except ValueError:
        return None


def _parse(words: list[str]) -> Extent:
    match words:
        case ["grid", t, h, w]:
            return Grid(_integer(t), _integer(h), _integer(w))
        case ["windows", n, ms, *spans]:
            windows = Windows(_integer(n), _integer(ms, _U64), tuple(_span(span) for span in spans))
            if windows.spans and len(windows.spans) != windows.n_windows:
                raise ValueError("a span for each window")
            return windows
        case ["tokens"]:
            return Tokens()
        case ["video", t, h, w, interval, *times]:
            video = Video(_integer(t), _integer(h), _integer(w), _seconds(interval), tuple(map(_seconds, times)))
            if len(video.times) != video.t:
                raise ValueError("a time for each temporal patch")
            return video
    raise ValueError("no extent")


def _integer(word: str, most: int = _U32) -> int:
    if not _INTEGER.fullmatch(word) or int(word) > most:
        raise ValueError(word)
    return int(word)


def _span(word: str) -> tuple[int, int]:
    start, dash, end = word.partition("-")
    if not dash:
        raise ValueError(word)
    return _integer(start), _integer(end)


def _seconds(word: str) -> float:
    seconds = float(word) if _NUMBER.fullmatch(word) else -1.0
    if not 0.0 <= seconds < float("inf"):
        raise ValueError(word)
    return seconds


def _seconds_text(seconds: float) -> str:
    """The shortest digits that read back, without an exponent: the text that Rust writes."""
    text = format(Decimal(repr(float(seconds))), "f")
    return text.removesuffix(".0")
