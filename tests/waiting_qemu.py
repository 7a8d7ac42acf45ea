"""What a standby hears of the QEMU that waits for its guest, where there is none."""


async def it_waits() -> str:
    """Nothing keeps it from going on with the guest."""
    return ""


async def it_has_ended() -> str:
    """It was killed."""
    return "has ended"
