"""Guest RAM from outside QEMU: process ids and page ranges in, pages out."""
