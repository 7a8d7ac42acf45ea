/* One record on the disk, and the header of the ring they lie in. Both are one 4 KiB block that carries its own
 * checksum; a record's body follows from its number, so that a block of another record is never taken for it. */
#include "guestload.h"

#include <string.h>

enum { BODY_WORDS = 508 };

struct record {
    char magic[8];
    uint64_t ring;      /* random, made with the ring: records of an older ring are foreign */
    uint64_t number;    /* a record's sequence number, from 1; in the header the number of slots */
    uint64_t body[BODY_WORDS];
    uint64_t sum;
};
_Static_assert(sizeof(struct record) == RECORD_BYTES, "a record is one block");

static uint64_t sum_of(const struct record *record)
{
    uint64_t words[RECORD_BYTES / 8], sum = 14695981039346656037u;
    memcpy(words, record, sizeof words);
    for (size_t i = 0; i < RECORD_BYTES / 8 - 1; i++)
        sum = (sum ^ words[i]) * 1099511628211u;
    return mix64(sum);
}

static void make(struct record *record, const char *magic, uint64_t ring, uint64_t number)
{
    uint64_t state = mix64(ring + number) | 1;
    memcpy(record->magic, magic, 8);
    record->ring = ring;
    record->number = number;
    for (int i = 0; i < BODY_WORDS; i++)
        record->body[i] = xorshift(&state);
    record->sum = sum_of(record);
}

static bool whole(const struct record *record, const char *magic)
{
    return !memcmp(record->magic, magic, 8) && record->sum == sum_of(record);
}

void record_make(struct record *record, uint64_t ring, uint64_t sequence)
{
    make(record, "VKRECORD", ring, sequence);
}

/* The record's sequence number, or 0 when it is not a whole record of this ring. */
uint64_t record_sequence(const struct record *record, uint64_t ring)
{
    return whole(record, "VKRECORD") && record->ring == ring ? record->number : 0;
}

void ring_header_make(struct record *record, uint64_t ring, uint64_t slots)
{
    make(record, "VKRING01", ring, slots);
}

bool ring_header_read(const struct record *record, uint64_t *ring, uint64_t *slots)
{
    if (!whole(record, "VKRING01"))
        return false;
    *ring = record->ring;
    *slots = record->number;
    return true;
}
