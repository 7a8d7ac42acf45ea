"""Points in time of VMs, kept for good: pages by what they hold, in packs, under manifests.

All of it blocks: call it in a thread. What is used from outside:

    from vmckpt.store.open import create_store, open_store     # a place: a path, s3://..., a file
    from vmckpt.store.keys import KeySource                     # only for encrypted stores

    store = open_store(place, key=None)                         # Store
    store.manifests()                -> list[Manifest]          # whole catalogue, oldest first
    store.manifest(checkpoint_id)    -> Manifest                # raises NotFoundError
    store.find(text, vm=None)        -> Manifest                # id or the beginning of one

    with store.begin(vm, parent=None) as new:                   # Transaction: one writer per VM
        ram = new.area("ram", size_bytes=1 << 30, chunk_bytes=PAGE_CHUNK_BYTES)
        ram.put(numbers, data)       # page numbers (int64 array), contents one after the other;
                                     # zero pages and ones the store has cost nothing; later wins
        ram.put_file(fd, spans)      # straight from a file: spans (start, end) in bytes, aligned
        ram.put_zero(numbers)
        disk = new.area("disk-0", size_bytes=..., chunk_bytes=BLOCK_CHUNK_BYTES)
        new.blob("device-state", data)
        manifest = new.commit(facts) # facts: JSON; all of it is there from now on, or nothing
    # Left without commit(), or by an exception: aborted, nothing stays.

With a parent, an area begins as the parent's area of that name stands; without one it is zeroes.
A blob is not inherited. Nothing depends on the parent afterwards: it may be removed.

    with store.read(checkpoint_id) as point:                    # Checkpoint; it stays meanwhile
        point.manifest, point.blob("device-state")
        ram = point.area("ram")      # Area
        ram.numbers()                # int64 array: the chunks that are not zero, ascending
        ram.read(numbers)            # bytes of these chunks in this order, zeroes included
        ram.read_around(number)      # (numbers, contents): chunks that are had for the price of one
        ram.stream()                 # iterator of (numbers, contents): every chunk that is not
                                     # zero once, as fast as it goes, not in order

    store.diff(a, b)                 -> {area: int64 array of chunks that differ}
    store.remove(ids)                # space comes back by gc; refused while one has a pin
    store.pin(new_pin(id, why, by)), store.unpin(pin), store.pins() -> {id: (Pin, ...)}
"""
