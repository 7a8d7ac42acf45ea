"""One QEMU's monitor: typed commands, replies and events over a connected socket."""
