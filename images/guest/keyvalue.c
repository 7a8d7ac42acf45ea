/* Did a connection lose or double a request? Every reply carries the number of requests that its connection has
 * made, `ok N ...` or `error N ...`; keys are shared by all connections. One thread serves them: no lock. */
#include "guestload.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BUCKETS = 1024, MAX_KEYS = 65536, MAX_KEY = 128 };

struct entry {
    struct entry *next;
    char *value;
    char key[];
};

static struct entry *buckets[BUCKETS];
static unsigned keys;

/* The place of `key`, or the end of its chain. */
static struct entry **place_of(const char *key)
{
    uint64_t hash = 0;
    for (const char *c = key; *c; c++)
        hash = mix64(hash ^ (uint64_t)(unsigned char)*c);
    struct entry **place = &buckets[hash % BUCKETS];
    while (*place && strcmp((*place)->key, key))
        place = &(*place)->next;
    return place;
}

static bool store(const char *key, const char *value)
{
    struct entry **place = place_of(key);
    char *copy = strdup(value);
    if (!copy)
        return false;
    if (!*place) {
        size_t length = strlen(key) + 1;
        struct entry *entry = length <= MAX_KEY && keys < MAX_KEYS ? malloc(sizeof *entry + length) : NULL;
        if (!entry) {
            free(copy);
            return false;
        }
        memcpy(entry->key, key, length);
        entry->next = NULL;
        entry->value = NULL;
        *place = entry;
        keys++;
    }
    free((*place)->value);
    (*place)->value = copy;
    return true;
}

/* `set K V` | `get K` | `incr K` | `echo WORDS` | `seq` */
int keyvalue_answer(struct session *session, char *line, char *reply, size_t room)
{
    unsigned long long number = session->requests;
    char *verb = line, *key = line + strcspn(line, " ");
    if (*key)
        *key++ = 0;
    if (!strcmp(verb, "seq"))
        return snprintf(reply, room, "ok %llu", number);
    if (!strcmp(verb, "echo"))
        return snprintf(reply, room, "ok %llu %s", number, key);

    char *value = key + strcspn(key, " ");
    if (*value)
        *value++ = 0;
    if (!*key)
        return snprintf(reply, room, "error %llu a key is missing", number);
    struct entry *entry = *place_of(key);
    if (!strcmp(verb, "get")) {
        if (!entry)
            return snprintf(reply, room, "error %llu no such key", number);
        return snprintf(reply, room, "ok %llu %s", number, entry->value);
    }
    char sum[24];
    if (!strcmp(verb, "incr")) {
        snprintf(sum, sizeof sum, "%lld", (entry ? atoll(entry->value) : 0) + 1);
        value = sum;
    } else if (strcmp(verb, "set")) {
        return snprintf(reply, room, "error %llu unknown request", number);
    }
    if (!store(key, value))
        return snprintf(reply, room, "error %llu no room for the key", number);
    return verb[0] == 'i' ? snprintf(reply, room, "ok %llu %s", number, sum)
                          : snprintf(reply, room, "ok %llu", number);
}
