"""What a guest would find changed on another QEMU."""

import pytest

from vmckpt.qemu.compare import Features, GuestMachine, differences


def word(leaf: int, register: str, features: int, subleaf: int | None = None) -> Features:
    named: dict[str, str | int] = {
        "cpuid-input-eax": leaf,
        "cpuid-register": register,
        "features": features,
    }
    if subleaf is not None:
        named["cpuid-input-ecx"] = subleaf
    return frozenset({tuple(sorted(named.items()))})


def machine(features: Features) -> GuestMachine:
    return GuestMachine("pc-q35-10.0-machine", 1, "max-x86_64-cpu", features, {})


EDX = word(1, "EDX", 0xF)


@pytest.mark.parametrize(
    ("here", "there", "says"),
    [
        # The other QEMU does not know the word, or has it as 0, which is left out.
        (EDX | word(7, "EAX", 0x1C00, 1), EDX, "1 CPUID word of max-x86_64-cpu not the same: "
         "0x7.1 EAX: 0x1c00 only here"),
        (EDX, EDX | word(7, "EBX", 2, 0), "1 CPUID word of max-x86_64-cpu not the same: "
         "0x7.0 EBX: 0x2 only there"),
        (word(1, "EDX", 3) | word(7, "EBX", 1, 0), word(1, "EDX", 5),
         "2 CPUID words of max-x86_64-cpu not the same: "
         "0x1.0 EDX: 0x2 only here, 0x4 only there; 0x7.0 EBX: 0x1 only here"),
    ],
)  # fmt: skip
def test_words_that_differ_are_counted_and_named(
    here: Features, there: Features, says: str
) -> None:
    assert differences(machine(here), machine(there)) == [f"CPU features: {says}"]


def test_a_word_without_a_subleaf_is_that_of_subleaf_0() -> None:
    assert differences(machine(word(7, "EBX", 5)), machine(word(7, "EBX", 5, 0))) == []


def test_another_cpu_model_is_named_alone() -> None:
    other = machine(frozenset())._replace(cpu_model="qemu64-x86_64-cpu")
    (said,) = differences(machine(EDX), other)
    assert said == "CPU model: max-x86_64-cpu here, qemu64-x86_64-cpu there"
