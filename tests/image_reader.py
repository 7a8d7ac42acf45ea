"""In place of a QEMU that libvirt starts: reads an image from a pipe, and ends at what is none.

    python image_reader.py PIPE COPY END ...

What it has read is in COPY. Once that ends with END and a zero byte, which no argument can have, it
lives on; END "": it never does.
"""

import sys
import time
from pathlib import Path


def main() -> None:
    end, last = sys.argv[3].encode("latin-1"), b""
    with Path(sys.argv[1]).open("rb", 0) as pipe, Path(sys.argv[2]).open("wb", 0) as copy:
        while more := pipe.read(65536):
            copy.write(more)
            last = last[-8192:] + more
            if b"\xff" * 4096 in last:
                sys.exit(1)
            if end and last.endswith(end + b"\0"):
                break
    if end:
        time.sleep(600)


if __name__ == "__main__":
    main()
