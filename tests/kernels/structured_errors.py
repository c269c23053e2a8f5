"""Errors with one cause that touch many elements of a block: what breaks in machines.

Each takes elements ``[blocks, tokens, features]`` as unsigned integers of their own width, and
gives damaged ones. A bit is numbered within an element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Elements = npt.NDArray[Any]
Damage = Callable[[Elements], Elements]

KINDS = {torch.float32: np.uint32, torch.float16: np.uint16, torch.bfloat16: np.uint16}
STRIDES = (1, 2, 3, 4, 8)
"""An error touches every feature, every second, ...: any number of places in words of any width."""


@dataclass(frozen=True)
class Error:
    """One cause, and its name."""

    name: str
    damage: Damage


def structured_errors(dtype: torch.dtype, features: int) -> Iterator[Error]:
    """All errors of the list, at every bit, for blocks of this dtype and row length."""
    bits = np.dtype(KINDS[dtype]).itemsize * 8
    for bit in range(bits):
        for stride in STRIDES:
            for first in {0, stride - 1}:
                every = slice(first, None, stride)
                where = f"bit {bit} of features {first}::{stride}"
                yield Error(f"line stuck at 0, {where}", _clear(bit, every))
                yield Error(f"line stuck at 1, {where}", _set(bit, every))
                yield Error(f"flipped {where}", _flip(bit, every))
        for feature in (0, 1, features - 1):
            where = f"bit {bit} of feature {feature}"
            yield Error(f"flipped {where}", _flip(bit, slice(feature, feature + 1)))
            yield Error(f"cleared {where}", _clear(bit, slice(feature, feature + 1)))
        yield Error(f"2**{bit} added", _add(1 << bit))
        yield Error(f"flipped bit {bit} of odd tokens", _flip_tokens(bit))
    for stride in STRIDES:
        yield Error(f"lost sign of features ::{stride}", _clear(bits - 1, slice(0, None, stride)))
    for shift in (1, 2, 4, features // 2 + 1):
        yield Error(f"lanes shifted by {shift}", partial(np.roll, shift=shift, axis=2))
        yield Error(f"lanes moved on by {shift}", partial(_move_on, by=shift))
        yield Error(f"tokens shifted by {shift}", partial(np.roll, shift=shift, axis=1))
    yield Error("bytes of rows shifted by 1", _shift_bytes)
    for size in (2, 4, 8, 16):
        yield Error(f"halves of {size} bytes swapped", partial(_swap_halves, size=size))
    yield Error("halves of rows swapped", lambda x: np.roll(x, features // 2, 2))
    yield Error("halves of the block swapped", lambda x: np.roll(x, x.shape[1] // 2, 1))
    for count in (1, 2, 8):
        yield Error(f"{count} rows zeroed", partial(_zero, tokens=count))
        yield Error(f"{count} features zeroed", partial(_zero, features=count))
    yield Error("all zeroed", np.zeros_like)
    for value in (1.0, -1.0, 0.5, 1e-3):
        yield Error(f"{value} added", _floats(dtype, 1, value))
    yield Error("negated", _floats(dtype, -1, 0))
    yield Error("doubled", _floats(dtype, 2, 0))


def _clear(bit: int, features: slice) -> Damage:
    return lambda x: _changed(x, features, lambda y: y & ~y.dtype.type(1 << bit))


def _set(bit: int, features: slice) -> Damage:
    return lambda x: _changed(x, features, lambda y: y | y.dtype.type(1 << bit))


def _flip(bit: int, features: slice) -> Damage:
    return lambda x: _changed(x, features, lambda y: y ^ y.dtype.type(1 << bit))


def _changed(x: Elements, features: slice, change: Damage) -> Elements:
    out = x.copy()
    out[:, :, features] = change(out[:, :, features])
    return out


def _flip_tokens(bit: int) -> Damage:
    def damage(x: Elements) -> Elements:
        out = x.copy()
        out[:, 1::2] ^= x.dtype.type(1 << bit)
        return out

    return damage


def _add(value: int) -> Damage:
    return lambda x: x + x.dtype.type(value)


def _move_on(x: Elements, by: int) -> Elements:
    """The first lanes are lost; the last repeat."""
    out = x.copy()
    out[:, :, :-by] = x[:, :, by:]
    return out


def _shift_bytes(x: Elements) -> Elements:
    return np.roll(x.view(np.uint8), 1, 2).copy().view(x.dtype)


def _swap_halves(x: Elements, size: int) -> Elements:
    pairs = x.view(np.uint8).reshape(*x.shape[:2], -1, 2, size // 2)
    return pairs[:, :, :, ::-1].reshape(*x.shape[:2], -1).copy().view(x.dtype)


def _zero(x: Elements, *, tokens: int | None = None, features: int | None = None) -> Elements:
    """The first of each; None for all."""
    out = x.copy()
    out[:, :tokens, :features] = 0
    return out


def _floats(dtype: torch.dtype, factor: float, addend: float) -> Damage:
    def damage(x: Elements) -> Elements:
        floats = torch.from_numpy(x.copy()).view(dtype) * factor + addend
        out: Elements = floats.to(dtype).view(torch.uint8).numpy().view(x.dtype)
        return out

    return damage
