"""One VM, whoever runs its QEMU: vmckpt or libvirt. The two are told apart nowhere else above `vm`.

Of operations only what a call needs is imported, when it is called: commands start fast.
"""
