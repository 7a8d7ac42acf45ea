"""One VM, run by vmckpt or by libvirt. Above `vm`, only this package distinguishes them.

Operations are imported on use, so that commands start fast.
"""
