"""Checkpoint storage: deduplicated chunks in packs, indexed by one manifest per checkpoint.

All calls block: run them in a thread. The public interface:

    from vmckpt.store.open import create_store, open_store     # a path, s3://..., a file
    from vmckpt.store.sealing.keys import KeySource             # only for encrypted stores

    store = open_store(location, key=None)                         # Store
    store.manifests()                -> list[Manifest]          # whole catalogue, oldest first
    store.manifest(checkpoint_id)    -> Manifest                # raises NotFoundError
    store.find(text, vm=None)        -> Manifest                # by id prefix or name

    with store.begin(vm, parent=None) as new:                   # Transaction: one writer per VM
        ram = new.area("ram", size_bytes=1 << 30, chunk_bytes=PAGE_CHUNK_BYTES)
        ram.put(numbers, data)       # page numbers (int64 array), contents one after the other;
                                     # zero and known pages cost nothing; the later one wins
        ram.put_file(fd, spans)      # from a file: spans (start, end) in bytes, aligned
        ram.put_zero(numbers)
        disk = new.area("disk-0", size_bytes=..., chunk_bytes=BLOCK_CHUNK_BYTES)
        new.blob("device-state", data)
        manifest = new.commit(facts) # facts: JSON; atomic and durable
    # Without commit(), or after an exception: aborted, nothing remains.

With a parent, an area starts as the parent's area of that name; without one it is zeroes. Blobs are
not inherited. Nothing depends on the parent afterwards: it may be removed.

    with store.read(checkpoint_id) as point:                    # Checkpoint; not removed meanwhile
        point.manifest, point.blob("device-state")
        ram = point.area("ram")      # Area
        ram.numbers()                # int64 array: the chunks that are not zero, ascending
        ram.read(numbers)            # bytes of these chunks in this order, zeroes included
        ram.read_around(number)      # (numbers, contents): chunks that one read yields
        ram.stream()                 # iterator of (numbers, contents): every non-zero chunk
                                     # once, at full speed, in storage order

    store.diff(a, b)                 -> {area: int64 array of chunks that differ}
    store.remove(ids)                # gc frees the space; refused while one is pinned
    store.pin(new_pin(id, why, by)), store.unpin(pin), store.pins() -> {id: (Pin, ...)}
"""
