"""The hooks that come with vmckpt, each as one file to install in guests."""

import io
from enum import StrEnum

HOOKS = "vmckpt.devices.hooks"
FIRST_LINE = b"#!/usr/bin/env python3\n"
MAIN = "import sys\n\nfrom {package}.main import main\n\nsys.exit(main(sys.argv))\n"
# The earliest time that a zip file can hold: the same sources yield the same bytes.
NO_TIME = (1980, 1, 1, 0, 0, 0)


class Vendor(StrEnum):
    """The vendor of a hook's devices."""

    NVIDIA = "nvidia"
    AMD = "amd"
    GENERIC = "generic"


def hook_file(vendor: Vendor) -> bytes:
    """The hook's file: a script or a Python zipapp."""
    from importlib.resources import files

    if vendor is Vendor.NVIDIA:
        return _zipapp(f"{HOOKS}.{vendor.value}")
    return files(HOOKS).joinpath(vendor.value).read_bytes()


def _zipapp(package: str) -> bytes:
    """Pack a package whose module `main` has a function `main`, inside empty parent packages."""
    import zipfile
    from importlib.resources import files

    parts = package.split(".")
    inside = {"__main__.py": MAIN.format(package=package)}
    for depth in range(1, len(parts)):
        inside["/".join([*parts[:depth], "__init__.py"])] = ""
    for file in files(package).iterdir():
        if file.name.endswith(".py"):
            inside["/".join([*parts, file.name])] = file.read_text()
    packed = io.BytesIO()
    packed.write(FIRST_LINE)
    with zipfile.ZipFile(packed, "a", zipfile.ZIP_DEFLATED) as archive:
        for name, text in sorted(inside.items()):
            archive.writestr(zipfile.ZipInfo(name, NO_TIME), text, zipfile.ZIP_DEFLATED)
    return packed.getvalue()
