"""A lab takes a management network that leads nowhere else on this machine."""

from vmckpt.lab.real.management import free_networks

HEAD = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
DEFAULT = "eth0\t00000000\t0101A8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
OF_ANOTHER_LAB = "vklab1\t00014E0A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"  # 10.78.1.0/24
SOMEBODYS_HOST = "tun0\t07024E0A\t00000000\t0005\t0\t0\t0\tFFFFFFFF\t0\t0\t0\n"  # 10.78.2.7/32
ALL_OF_10 = "tun0\t0000000A\t00000000\t0001\t0\t0\t0\t000000FF\t0\t0\t0\n"


def test_the_default_route_leads_nowhere_in_particular() -> None:
    assert list(free_networks(HEAD + DEFAULT, range(3))) == [0, 1, 2]


def test_what_a_route_leads_to_in_whole_or_in_part_is_taken() -> None:
    routes = HEAD + DEFAULT + OF_ANOTHER_LAB + SOMEBODYS_HOST
    assert list(free_networks(routes, range(4))) == [0, 3]


def test_all_may_be_taken() -> None:
    assert list(free_networks(HEAD + ALL_OF_10, range(256))) == []
