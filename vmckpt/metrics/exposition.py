"""Prometheus' text format (version 0.0.4), written from plain values. Pure.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Kind(StrEnum):
    """What a family's samples are."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Sample(NamedTuple):
    """One value. `suffix` is what a histogram's samples have behind the family's name."""

    labels: Mapping[str, str]
    value: float
    suffix: str = ""


@dataclass(slots=True)
class Family:
    """A metric with all its samples; a family without any is not written."""

    name: str
    kind: Kind
    help: str
    samples: list[Sample] = field(default_factory=list)

    def add(self, value: float | None, **labels: str) -> None:
        """One more sample; nothing for None, what is not known."""
        if value is not None:
            self.samples.append(Sample(labels, float(value)))

    def observe(self, values: Sequence[float], bounds: Sequence[float], **labels: str) -> None:
        """A histogram of values; `bounds` ascend."""
        for bound in (*bounds, math.inf):
            count = sum(value <= bound for value in values)
            self.samples.append(Sample(labels | {"le": _number(bound)}, count, "_bucket"))
        self.samples.append(Sample(labels, math.fsum(values), "_sum"))
        self.samples.append(Sample(labels, len(values), "_count"))


def render(families: Iterable[Family]) -> str:
    """The families as text, in their order."""
    lines = []
    for family in families:
        if not family.samples:
            continue
        lines.append(f"# HELP {family.name} {_escaped(family.help)}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        for sample in family.samples:
            pairs = ",".join(
                f'{name}="{_escaped(value, quote=True)}"' for name, value in sample.labels.items()
            )
            labels = f"{{{pairs}}}" if pairs else ""
            lines.append(f"{family.name}{sample.suffix}{labels} {_number(sample.value)}")
    return "".join(f"{line}\n" for line in lines)


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(value)


def _escaped(text: str, *, quote: bool = False) -> str:
    # Half a surrogate pair has no UTF-8: one label would keep all that is scraped back.
    text = text.encode(errors="replace").decode()
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text
