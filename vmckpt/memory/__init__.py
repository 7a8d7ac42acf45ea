"""Guest RAM seen from outside QEMU: pids and page ranges in, pages out. Knows no QMP, no store."""
