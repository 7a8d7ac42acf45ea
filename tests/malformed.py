"""Malformed replies: well-formed ones, changed as a broken or hostile writer would change them."""

import copy
import json
import random
from collections.abc import Callable
from typing import Any

WRONG: tuple[Any, ...] = (
    None, True, False, 0, -1, 3, 1.5, -0.0, 1 << 31, 1 << 63, 1 << 70, -(1 << 70), 1e300, "", "x",
    "-1", "NaN", "\x1b[2J", "a\nb", "\u202e", "\x00", "../../etc", "x" * 3000, [], [[]], {},
    {"": {}}, [1, "a", None], {"return": {}}, {"error": 3},
)  # fmt: skip


def mutated(rng: random.Random, sample: Any) -> bytes:
    """A sample as JSON, with one to three things wrong with it; now and then with none."""
    value = json.loads(json.dumps(sample))
    for _ in range(rng.randint(0, 3)):
        value = _changed(rng, value)
    data = json.dumps(value).encode()
    if rng.random() < 0.5:
        data = rng.choice(_OF_TEXT)(rng, data)
    return data.replace(b"\n", b" ") + b"\n"


def _changed(rng: random.Random, value: Any) -> Any:
    """Somewhere in it, another value, a field less, or a field more."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(list(value))
        match rng.randrange(5):
            case 0:
                del value[name]
            case 1:
                value[f"{name}{name}"] = value.pop(name)
            case _:
                value[name] = _changed(rng, value[name])
        return value
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        match rng.randrange(5):
            case 0:
                del value[at]
            case 1:
                value.insert(at, copy.deepcopy(rng.choice(WRONG)))
            case _:
                value[at] = _changed(rng, value[at])
        return value
    return copy.deepcopy(rng.choice(WRONG))


def _deep(rng: random.Random, data: bytes) -> bytes:
    levels = rng.choice([70, 900, 2000, 100_000])
    left, right = rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
    return left * levels + b"1" + right * levels


def _flipped(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _put(text: bytes) -> Callable[[random.Random, bytes], bytes]:
    def put(rng: random.Random, data: bytes) -> bytes:
        """In place of some number or text."""
        places = [at for at, byte in enumerate(data) if byte in b":,["]
        if not places:
            return text
        at = rng.choice(places) + 1
        end = next((i for i in range(at, len(data)) if data[i] in b",]}"), len(data))
        return data[:at] + text + data[end:]

    return put


_OF_TEXT: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    _deep,
    _flipped,
    _flipped,
    _put(b"NaN"),
    _put(b"-Infinity"),
    _put(b"1e999"),
    _put(b'"\\ud800"'),
    _put(b'"\xff\xfe"'),
    _put(b"1" * 5000),
    lambda rng, data: data[: rng.randrange(len(data))],
    lambda rng, data: data[:1] + b'"a":1,"a":2,' + data[1:],
    lambda rng, data: data + data,
    lambda rng, data: rng.randbytes(rng.randrange(1, 200)),
    lambda rng, data: data[:-1] + b" " * 3000 + data[-1:],
)
