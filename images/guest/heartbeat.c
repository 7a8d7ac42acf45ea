/* Was the guest alive at this millisecond? A numbered datagram at a set rate; whoever receives them measures the
 * gaps, as a stopped guest's own clock stops with it. */
#include "guestload.h"

#include <arpa/inet.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

struct datagram { /* little endian, as the machine is */
    char magic[4];
    uint32_t id;
    uint64_t sequence;
    uint64_t sent_ns; /* the guest's CLOCK_MONOTONIC */
    uint64_t reserved;
};
_Static_assert(sizeof(struct datagram) == 32, "the datagram is 32 bytes");

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct sockaddr_in destination;
static uint64_t period_ns = 1000000;
static bool beating;
static uint32_t guest_id;
static atomic_ullong sent, refused;

static void *beat(void *unused)
{
    (void)unused;
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    struct sched_param real_time = {.sched_priority = 10};
    pthread_setschedparam(pthread_self(), SCHED_FIFO, &real_time); /* the load must not make it late */
    uint64_t due_ns = now_ns();
    for (;;) {
        pthread_mutex_lock(&lock);
        bool on = beating;
        uint64_t period = on ? period_ns : 20000000;
        struct sockaddr_in to = destination;
        pthread_mutex_unlock(&lock);
        if (on) {
            struct datagram datagram = {"VKHB", guest_id, atomic_load(&sent) + 1, now_ns(), 0};
            /* Only what left is numbered: a gap in the numbers is the network's doing. */
            if (sendto(fd, &datagram, sizeof datagram, 0, (struct sockaddr *)&to, sizeof to) < 0)
                atomic_fetch_add(&refused, 1);
            else
                atomic_fetch_add(&sent, 1);
        }
        due_ns += period;
        uint64_t now = now_ns();
        if (due_ns + period < now) /* late by more than one: no burst to make up for it */
            due_ns = now + period;
        struct timespec until = {(time_t)(due_ns / 1000000000u), (long)(due_ns % 1000000000u)};
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
    }
    return NULL;
}

static bool parse_destination(char *text, struct sockaddr_in *address)
{
    char *colon = strchr(text, ':');
    uint64_t port = 7700;
    if (colon) {
        *colon = 0;
        if (!parse_bytes(colon + 1, &port) || !port || port > 65535)
            return false;
    }
    *address = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    return inet_pton(AF_INET, text, &address->sin_addr) == 1;
}

/* `heartbeat off` | `heartbeat dest=IP[:PORT] [hz=1..10000]` */
int heartbeat_command(char **words, int count, char *reply, size_t room)
{
    struct sockaddr_in to = destination;
    uint64_t hz = 1000000000u / period_ns;
    bool on = !(count == 1 && !strcmp(words[0], "off"));
    for (int i = 0; on && i < count; i++) {
        char *key, *value;
        if (!option(words[i], &key, &value))
            return failed(reply, room, "heartbeat: cannot read '%s'", words[i]);
        bool good = false;
        if (!strcmp(key, "dest"))
            good = parse_destination(value, &to);
        else if (!strcmp(key, "hz"))
            good = parse_bytes(value, &hz) && hz >= 1 && hz <= 10000;
        if (!good)
            return failed(reply, room, "heartbeat: cannot read '%s'", key);
    }
    if (on && !to.sin_port)
        return failed(reply, room, "heartbeat: dest is missing");
    pthread_mutex_lock(&lock);
    destination = to;
    period_ns = 1000000000u / hz;
    beating = on;
    pthread_mutex_unlock(&lock);
    return snprintf(reply, room, "ok seq=%llu hz=%llu", (unsigned long long)atomic_load(&sent),
                    (unsigned long long)(on ? hz : 0));
}

int heartbeat_stat(char *reply, size_t room)
{
    return snprintf(reply, room, " heartbeat_seq=%llu heartbeat_refused=%llu",
                    (unsigned long long)atomic_load(&sent), (unsigned long long)atomic_load(&refused));
}

void heartbeat_start(uint32_t id)
{
    guest_id = id;
    start_thread(beat, NULL);
}
