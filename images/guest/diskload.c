/* Is every acknowledged record still there, and whole? Numbered records go round a ring of slots on the disk
 * (O_DIRECT); a record is acknowledged once fdatasync returned after it. The ring outlives the guest. */
#include "guestload.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The first MiB stays untouched (boot sectors, partition tables); then the ring's header, then the slots. */
enum { HEADER_AT = 1 << 20, SLOTS_AT = HEADER_AT + RECORD_BYTES };
enum { CHUNK = 64, FLUSH_RECORDS = 16, LEAST_SLOTS = 64, USUAL_SLOTS = 16384 };
static const uint64_t FLUSH_NS = 100000000;

atomic_ullong disk_errors, disk_acknowledged;
static atomic_ullong stat_rate, stat_slots;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const char *path;
static int fd = -1;
static char *chunk;            /* CHUNK records, aligned for O_DIRECT */
static uint64_t ring, slots;   /* slots is 0 while there is no ring */
static uint64_t written;       /* the newest record's number */
static uint64_t highest;       /* the newest ever: after a power cut the ring may hold records past `written` */
static uint64_t flushed_ns;
static bool writing;
static struct pace pace;

static struct record *nth(int i)
{
    return (struct record *)(chunk + (size_t)i * RECORD_BYTES);
}

static off_t slot_at(uint64_t sequence)
{
    return SLOTS_AT + (off_t)(sequence % slots) * RECORD_BYTES;
}

static bool whole_io(bool out, int records, off_t at)
{
    size_t bytes = (size_t)records * RECORD_BYTES;
    ssize_t done = out ? pwrite(fd, chunk, bytes, at) : pread(fd, chunk, bytes, at);
    if (done == (ssize_t)bytes)
        return true;
    complain(&disk_errors, "disk %s at %lld: %s", out ? "write" : "read", (long long)at,
             done < 0 ? strerror(errno) : "short");
    return false;
}

static void acknowledge(void)
{
    if (fdatasync(fd) < 0) {
        complain(&disk_errors, "disk flush: %s", strerror(errno));
        return;
    }
    flushed_ns = now_ns();
    atomic_store(&disk_acknowledged, written);
}

static void write_records(uint64_t due)
{
    while (due) {
        uint64_t to_end = slots - (written + 1) % slots;
        uint64_t to_flush = FLUSH_RECORDS - written % FLUSH_RECORDS;
        int count = (int)(due < to_flush ? due : to_flush);
        if ((uint64_t)count > to_end)
            count = (int)to_end;
        for (int i = 0; i < count; i++)
            record_make(nth(i), ring, written + 1 + (uint64_t)i);
        if (!whole_io(true, count, slot_at(written + 1)))
            return;
        written += (uint64_t)count;
        highest = written > highest ? written : highest;
        due -= (uint64_t)count;
        if (written % FLUSH_RECORDS == 0)
            acknowledge();
    }
    if (written != atomic_load(&disk_acknowledged) && now_ns() - flushed_ns > FLUSH_NS)
        acknowledge();
}

static void *write_disk(void *unused)
{
    (void)unused;
    for (;;) {
        pthread_mutex_lock(&lock);
        if (writing)
            write_records(pace_due(&pace, 1));
        pthread_mutex_unlock(&lock);
        sleep_us(4000);
    }
    return NULL;
}

/* Reads the whole ring into found[slot] = the number of the whole record there, or 0. */
static uint64_t *read_ring(void)
{
    uint64_t *found = calloc(slots, sizeof *found);
    for (uint64_t slot = 0; found && slot < slots; slot += CHUNK) {
        int count = (int)(slots - slot < CHUNK ? slots - slot : CHUNK);
        if (!whole_io(false, count, slot_at(slot)))
            continue;
        for (int i = 0; i < count; i++) {
            uint64_t sequence = record_sequence(nth(i), ring);
            found[slot + (uint64_t)i] = sequence % slots == slot + (uint64_t)i ? sequence : 0;
        }
    }
    return found;
}

static uint64_t oldest(void)
{
    return highest > slots ? highest - slots + 1 : 1;
}

/* Goes on after the newest record. One that was not flushed yet may be missing (a power cut may lose it): then the
 * ring goes on from the gap. Nothing here counts as an error; `disk verify` does. */
static bool resume_ring(void)
{
    uint64_t *found = read_ring();
    if (!found)
        return false;
    highest = 0;
    for (uint64_t slot = 0; slot < slots; slot++)
        highest = found[slot] > highest ? found[slot] : highest;
    written = highest;
    uint64_t unsure = highest > FLUSH_RECORDS ? highest - FLUSH_RECORDS + 1 : 1;
    for (uint64_t sequence = highest; sequence >= unsure; sequence--)
        if (found[sequence % slots] != sequence)
            written = sequence - 1;
    free(found);
    atomic_store(&disk_acknowledged, written);
    return true;
}

/* Makes a ring of `count` slots; whatever lies on the disk is of another ring from then on. */
static const char *make_ring(uint64_t count)
{
    uint64_t fresh = mix64(now_ns() ^ (ring << 1));
    ring_header_make(nth(0), fresh, count);
    if (!whole_io(true, 1, HEADER_AT) || fdatasync(fd) < 0)
        return "cannot write the ring's header";
    ring = fresh;
    slots = count;
    written = highest = 0;
    atomic_store(&disk_acknowledged, 0);
    return NULL;
}

/* Opens the disk, and takes up the ring on it or, where that is allowed, makes one of `bytes` (0: as it is, or
 * 64 MiB). After an error the ring in use, if there was one, is as it was. */
static const char *open_ring(uint64_t bytes, bool may_make)
{
    if (fd < 0)
        fd = open(path, O_RDWR | O_DIRECT | O_CLOEXEC | (strncmp(path, "/dev/", 5) ? O_CREAT : 0), 0600);
    if (fd < 0)
        return strerror(errno);
    struct stat status;
    uint64_t wanted = bytes / RECORD_BYTES, there = 0, its_ring = 0;
    if (bytes && wanted < LEAST_SLOTS)
        return "size is too small";
    off_t room = lseek(fd, 0, SEEK_END);
    if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode)) {
        off_t needed = SLOTS_AT + (off_t)(wanted ? wanted : USUAL_SLOTS) * RECORD_BYTES;
        if (room < needed && posix_fallocate(fd, 0, needed))
            return "no space for the records";
        room = room < needed ? needed : room;
    }
    if (room < SLOTS_AT + LEAST_SLOTS * RECORD_BYTES)
        return "the disk is too small";
    uint64_t most = (uint64_t)(room - SLOTS_AT) / RECORD_BYTES;
    if (wanted > most)
        return "size does not fit the disk";
    bool known = whole_io(false, 1, HEADER_AT) && ring_header_read(nth(0), &its_ring, &there) && there <= most;
    if (!known && !may_make)
        return "no records on it yet";
    if (!known || (wanted && wanted != there))
        return make_ring(wanted ? wanted : most < USUAL_SLOTS ? most : USUAL_SLOTS);
    ring = its_ring;
    slots = there;
    if (resume_ring())
        return NULL;
    slots = 0;
    return "no memory to read the ring";
}

static int disk_begin(char **words, int count, char *reply, size_t room)
{
    uint64_t rate = 2 << 20, bytes = 0;
    for (int i = 0; i < count; i++) {
        char *key, *value;
        if (!option(words[i], &key, &value))
            return failed(reply, room, "disk: cannot read '%s'", words[i]);
        bool good = false;
        if (!strcmp(key, "rate"))
            good = parse_bytes(value, &rate);
        else if (!strcmp(key, "size"))
            good = parse_bytes(value, &bytes) && bytes;
        if (!good)
            return failed(reply, room, "disk: cannot read '%s'", key);
    }
    if (!slots || (bytes && bytes / RECORD_BYTES != slots)) {
        const char *why = open_ring(bytes, true);
        if (why)
            return failed(reply, room, "disk: %s: %s", path, why);
    }
    pace = (struct pace){(double)rate / RECORD_BYTES, 0, now_ns()};
    writing = rate > 0;
    atomic_store(&stat_rate, rate);
    atomic_store(&stat_slots, slots);
    return snprintf(reply, room, "ok slots=%llu seq=%llu rate=%llu", (unsigned long long)slots,
                    (unsigned long long)written, (unsigned long long)rate);
}

/* Every record from the ring's last lap up to the last acknowledged one must be in its slot, and whole. */
static int disk_verify(char *reply, size_t room)
{
    const char *why = slots ? NULL : open_ring(0, false);
    if (why)
        return failed(reply, room, "disk: %s: %s", path, why);
    uint64_t began = now_ns(), missing = 0, first_missing = 0, last = atomic_load(&disk_acknowledged);
    uint64_t *found = read_ring();
    if (!found)
        return failed(reply, room, "disk: no memory to read the ring");
    for (uint64_t sequence = oldest(); sequence <= last; sequence++) {
        if (found[sequence % slots] == sequence)
            continue;
        complain(&disk_errors, "disk record %llu is missing: its slot holds %llu", (unsigned long long)sequence,
                 (unsigned long long)found[sequence % slots]);
        if (!missing++)
            first_missing = sequence;
    }
    free(found);
    return snprintf(reply, room, "ok records=%llu wrong=%llu first_wrong=%llu seq=%llu errors=%llu took_ms=%llu",
                    (unsigned long long)(last >= oldest() ? last - oldest() + 1 : 0),
                    (unsigned long long)missing, (unsigned long long)first_missing, (unsigned long long)last,
                    (unsigned long long)atomic_load(&disk_errors),
                    (unsigned long long)(now_ns() - began) / 1000000);
}

/* `disk off` | `disk verify` | `disk [rate=] [size=]` */
int disk_command(char **words, int count, char *reply, size_t room)
{
    int length;
    pthread_mutex_lock(&lock);
    if (count == 1 && !strcmp(words[0], "off")) {
        if (writing)
            acknowledge();
        writing = false;
        atomic_store(&stat_rate, 0);
        length = snprintf(reply, room, "ok seq=%llu", (unsigned long long)atomic_load(&disk_acknowledged));
    } else if (count == 1 && !strcmp(words[0], "verify")) {
        length = disk_verify(reply, room);
    } else {
        length = disk_begin(words, count, reply, room);
    }
    pthread_mutex_unlock(&lock);
    return length;
}

/* Takes no lock: it must answer while a frozen file system holds the writer. */
int disk_stat(char *reply, size_t room)
{
    return snprintf(reply, room, " disk_slots=%llu disk_rate=%llu disk_seq=%llu disk_errors=%llu",
                    (unsigned long long)atomic_load(&stat_slots), (unsigned long long)atomic_load(&stat_rate),
                    (unsigned long long)atomic_load(&disk_acknowledged),
                    (unsigned long long)atomic_load(&disk_errors));
}

void diskload_start(const char *disk)
{
    path = disk;
    chunk = aligned_alloc(RECORD_BYTES, (size_t)CHUNK * RECORD_BYTES);
    if (!chunk)
        die("no memory for the disk's buffer");
    start_thread(write_disk, NULL);
}
