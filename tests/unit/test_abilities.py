"""What a pair of QEMUs agrees on: all of what is requested, or every reason why not."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.codec import builtins, convert
from vmckpt.foreign import MalformedError
from vmckpt.qemu.abilities import (
    HELD_BYTES_PER_S,
    SWITCHOVER_SPEED,
    ZERO_PAGES,
    Abilities,
    Agreement,
    Refusal,
    WantedSettings,
    agree,
    splits_well,
)
from vmckpt.qemu.replies import QemuVersion

CAPABILITIES = frozenset(
    {
        "xbzrle",
        "auto-converge",
        "events",
        "postcopy-ram",
        "return-path",
        "multifd",
        "postcopy-blocktime",
        "postcopy-preempt",
        "x-ignore-shared",
        "zero-copy-send",
    }
)
NEW = Abilities(
    version=QemuVersion(10, 0, 2),
    machines={"q35": "pc-q35-10.0", "pc-q35-10.0": "pc-q35-10.0", "pc-q35-7.2": "pc-q35-7.2"},
    cpu_models=frozenset({"qemu64", "max"}),
    capabilities=CAPABILITIES | {"mapped-ram", "switchover-ack"},
    compressions=frozenset({"none", "zlib", "zstd"}),
    parameters=frozenset({"downtime-limit", "max-bandwidth", SWITCHOVER_SPEED}),
    commands=frozenset({"migrate"}),
)
OLD = NEW._replace(
    version=QemuVersion(7, 2, 22),
    capabilities=CAPABILITIES | {"compress"},
    compressions=frozenset({"none", "zlib"}),
    parameters=NEW.parameters - {SWITCHOVER_SPEED},
)

wishes = st.builds(
    WantedSettings,
    zero_copy=st.booleans(),
    postcopy_bandwidth_bytes_per_s=st.sampled_from([0, 1 << 20]),
    postcopy=st.booleans(),
    auto_converge=st.booleans(),
    channels=st.none() | st.integers(1, 64),
    compression=st.none() | st.sampled_from(["zstd", "zlib", "xbzrle"]),
    max_downtime_ms=st.integers(0, 2_000_000),
    max_bandwidth_bytes_per_s=st.integers(0, 1 << 40),
)


def able(capabilities: frozenset[str], compressions: frozenset[str]) -> Abilities:
    return NEW._replace(capabilities=capabilities, compressions=compressions)


qemus = st.builds(
    able,
    st.frozensets(st.sampled_from(sorted(CAPABILITIES))),
    st.frozensets(st.sampled_from(["none", "zlib", "zstd"])),
)


def agreed(source: Abilities, target: Abilities, wish: WantedSettings) -> Agreement:
    result = agree(source, target, wish)
    assert isinstance(result, Agreement), result
    return result


def refused(source: Abilities, target: Abilities, wish: WantedSettings) -> list[Refusal]:
    result = agree(source, target, wish)
    assert isinstance(result, list), result
    return result


def test_the_plainest_wish() -> None:
    assert agreed(NEW, OLD, WantedSettings(max_downtime_ms=250)) == Agreement(
        capabilities={
            "return-path": True,
            "events": True,
            "postcopy-ram": False,
            "multifd": False,
            "xbzrle": False,
            "auto-converge": False,
            "postcopy-preempt": False,
            "postcopy-blocktime": False,
            "zero-copy-send": False,
            "x-ignore-shared": False,  # whatever left it on: memory would stay behind
        },
        source_parameters={"downtime-limit": 250, "max-bandwidth": 0, SWITCHOVER_SPEED: 0},
        target_parameters={},
    )


def test_the_switchover_waits_where_the_source_can_be_told_to() -> None:
    wish = WantedSettings(hold_switchover=True)
    assert agreed(NEW, OLD, wish).source_parameters[SWITCHOVER_SPEED] == HELD_BYTES_PER_S
    # What an earlier migration left is switched off.
    assert agreed(NEW, OLD, WantedSettings()).source_parameters[SWITCHOVER_SPEED] == 0
    assert SWITCHOVER_SPEED not in agreed(OLD, NEW, wish).source_parameters


@pytest.mark.parametrize(
    ("most", "first_and_most"), [(None, (20, 99)), (35, (20, 35)), (10, (10, 10)), (0, (1, 1))]
)
def test_auto_converge_keeps_to_the_slowdown_that_is_allowed(
    most: int | None, first_and_most: tuple[int, int]
) -> None:
    wish = WantedSettings(auto_converge=True, most_throttle_percent=most)
    told = agreed(NEW, NEW, wish).source_parameters
    assert (told["cpu-throttle-initial"], told["max-cpu-throttle"]) == first_and_most


@pytest.mark.parametrize(
    ("wish", "told"),
    [
        (WantedSettings(throttle_initial_percent=40), (40, 10, 99)),
        (WantedSettings(throttle_increment_percent=25), (20, 25, 99)),
        (WantedSettings(throttle_initial_percent=60, most_throttle_percent=50), (50, 10, 50)),
        # An earlier migration's are not kept.
        (WantedSettings(), (20, 10, 99)),
    ],
)
def test_auto_converge_begins_and_goes_on_as_it_is_told(
    wish: WantedSettings, told: tuple[int, int, int]
) -> None:
    names = ("cpu-throttle-initial", "cpu-throttle-increment", "max-cpu-throttle")
    found = agreed(NEW, NEW, wish._replace(auto_converge=True)).source_parameters
    assert tuple(found[name] for name in names) == told


def test_xbzrle_goes_without_channels_and_with_a_cache() -> None:
    result = agreed(NEW, NEW, WantedSettings(compression="xbzrle", xbzrle_cache_bytes=1 << 20))
    assert (result.capabilities["xbzrle"], result.capabilities["multifd"]) == (True, False)
    assert result.source_parameters["xbzrle-cache-size"] == 1 << 20
    plain = agreed(NEW, NEW, WantedSettings(compression="xbzrle"))
    assert plain.source_parameters["xbzrle-cache-size"] == 64 << 20
    [no] = refused(NEW, NEW, WantedSettings(compression="xbzrle", channels=2))
    assert no.option == "--parallel"


def test_a_level_is_told_to_the_compression_that_is_used() -> None:
    wish = WantedSettings(channels=2, compression="zstd", compression_level=7)
    assert agreed(NEW, NEW, wish).source_parameters["multifd-zstd-level"] == 7
    again = agreed(NEW, NEW, wish._replace(compression_level=None)).source_parameters
    assert again["multifd-zstd-level"] == 1
    assert "multifd-zlib-level" not in again


def test_memory_goes_without_copying_over_plain_channels_alone() -> None:
    assert agreed(NEW, NEW, WantedSettings(channels=2, zero_copy=True)).capabilities[
        "zero-copy-send"
    ]
    for wish in (
        WantedSettings(zero_copy=True),
        WantedSettings(channels=2, compression="zstd", zero_copy=True),
    ):
        assert [refusal.option for refusal in refused(NEW, NEW, wish)] == ["--zerocopy"]
    bare = NEW._replace(capabilities=NEW.capabilities - {"zero-copy-send"})
    [no] = refused(bare, NEW, WantedSettings(channels=2, zero_copy=True))
    assert (no.option, "the source's QEMU" in no.reason) == ("--zerocopy", True)


def test_a_limit_of_postcopy_needs_one_and_goes_with_the_next() -> None:
    wish = WantedSettings(postcopy=True, postcopy_bandwidth_bytes_per_s=5)
    assert agreed(NEW, NEW, wish).source_parameters["max-postcopy-bandwidth"] == 5
    assert (
        agreed(NEW, NEW, WantedSettings(postcopy=True)).source_parameters["max-postcopy-bandwidth"]
        == 0
    )
    [no] = refused(NEW, NEW, wish._replace(postcopy=False))
    assert no.option == "--postcopy-bandwidth"


def test_channels_are_the_same_on_both_ends() -> None:
    # Different counts hang both QEMUs forever.
    result = agreed(NEW, NEW, WantedSettings(channels=3, compression="zstd"))
    assert result.capabilities["multifd"]
    assert result.target_parameters == {"multifd-channels": 3, "multifd-compression": "zstd"}
    assert result.target_parameters.items() <= result.source_parameters.items()


def test_channels_without_compression_switch_an_old_one_off() -> None:
    assert (
        agreed(NEW, NEW, WantedSettings(channels=2)).source_parameters["multifd-compression"]
        == "none"
    )


@pytest.mark.parametrize("lacking", ["multifd", ZERO_PAGES, None])
def test_memory_is_split_where_both_look_for_zeroes_in_every_channel(lacking: str | None) -> None:
    can = NEW._replace(parameters=NEW.parameters | {ZERO_PAGES})
    assert "multifd" in can.capabilities
    cannot = can._replace(
        capabilities=can.capabilities - {lacking}, parameters=can.parameters - {lacking}
    )
    assert splits_well(can, cannot) is splits_well(cannot, can) is (lacking is None)


def test_a_refusal_names_the_option_the_side_and_its_version() -> None:
    bare = OLD._replace(capabilities=OLD.capabilities - {"postcopy-ram"})
    assert refused(NEW, bare, WantedSettings(postcopy=True)) == [
        Refusal(
            "--method postcopy",
            "the destination's QEMU 7.2.22 lacks migration capability 'postcopy-ram'",
        )
    ]
    assert (
        "the source's QEMU 7.2.22 lacks"
        in refused(bare, NEW, WantedSettings(postcopy=True))[0].reason
    )
    both = refused(bare, bare, WantedSettings(postcopy=True))[0].reason
    assert both.startswith("the source's QEMU 7.2.22 and the destination's QEMU 7.2.22 lack")


def test_a_compression_that_one_side_lacks_is_refused() -> None:
    wish = WantedSettings(channels=2, compression="zstd")
    for source, target in ((NEW, OLD), (OLD, NEW)):
        assert [refusal.option for refusal in refused(source, target, wish)] == ["--compress"]


def test_postcopy_with_channels_is_refused() -> None:
    options = [r.option for r in refused(NEW, NEW, WantedSettings(postcopy=True, channels=2))]
    assert options == ["--parallel"]


def test_every_reason_is_given_at_once() -> None:
    none = able(frozenset(), frozenset({"none"}))
    wish = WantedSettings(postcopy=True, auto_converge=True, channels=2, compression="zstd")
    assert {refusal.option for refusal in refused(NEW, none, wish)} == {
        "--method postcopy",
        "--compress",
        "--auto-converge",
        "migrate",
    }


@pytest.mark.parametrize("always", ["return-path", "events"])
def test_no_migration_goes_without_a_return_path(always: str) -> None:
    lacking = NEW._replace(capabilities=NEW.capabilities - {always})
    assert [r.option for r in refused(NEW, lacking, WantedSettings())] == ["migrate"]


@given(qemus, qemus, wishes)
def test_an_agreement_is_within_both_and_is_what_was_wished(
    source: Abilities, target: Abilities, wish: WantedSettings
) -> None:
    result = agree(source, target, wish)
    if isinstance(result, list):
        assert result
        assert all(refusal.option and refusal.reason for refusal in result)
        return
    on = {name for name, state in result.capabilities.items() if state}
    assert set(result.capabilities) <= source.capabilities & target.capabilities
    assert {"return-path", "events"} <= on
    assert ("postcopy-ram" in on) is wish.postcopy
    assert ("multifd" in on) is (wish.channels is not None)
    assert ("auto-converge" in on) is wish.auto_converge
    assert not {"postcopy-ram", "multifd"} <= on
    assert ("xbzrle" in on) is (wish.compression == "xbzrle")
    assert not {"xbzrle", "multifd"} <= on
    assert ("zero-copy-send" in on) is wish.zero_copy
    assert not wish.zero_copy or (wish.channels is not None and wish.compression is None)
    assert wish.postcopy or not wish.postcopy_bandwidth_bytes_per_s
    assert result.source_parameters["downtime-limit"] == wish.max_downtime_ms
    assert result.source_parameters["max-bandwidth"] == wish.max_bandwidth_bytes_per_s
    assert result.target_parameters.items() <= result.source_parameters.items()


@given(qemus, qemus, wishes)
def test_whether_a_pair_agrees_does_not_depend_on_the_direction(
    source: Abilities, target: Abilities, wish: WantedSettings
) -> None:
    there, back = agree(source, target, wish), agree(target, source, wish)
    assert isinstance(there, list) is isinstance(back, list)


@pytest.mark.parametrize("abilities", [NEW, OLD], ids=["10.0", "7.2"])
def test_abilities_survive_their_cache_file(abilities: Abilities) -> None:
    assert convert(Abilities, json.loads(json.dumps(builtins(abilities)))) == abilities


@pytest.mark.parametrize("text", ["{}", "[]", '{"version": {"major": 1}}', '{"version": 7}'])
def test_another_versions_cache_is_not_mistaken_for_one(text: str) -> None:
    with pytest.raises(MalformedError):
        convert(Abilities, json.loads(text))
