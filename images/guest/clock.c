/* Time, pace, and the small deterministic generator that everything uses. */
#include "guestload.h"

#include <errno.h>
#include <time.h>

uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void sleep_us(unsigned us)
{
    struct timespec t = {us / 1000000, (long)(us % 1000000) * 1000};
    while (nanosleep(&t, &t) < 0 && errno == EINTR) {
    }
}

/* splitmix64's finalizer: every bit of x reaches every bit of the result. */
uint64_t mix64(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

uint64_t xorshift(uint64_t *state)
{
    uint64_t x = *state;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return *state = x;
}

/* Whole tokens due now, taken out of the bucket. At most 50 ms' worth is kept: a guest that was held still does not
 * make up for it afterwards, which would hide the pause from a measured dirty rate. */
uint64_t pace_due(struct pace *pace, double factor)
{
    uint64_t now = now_ns();
    double most = pace->per_s * factor * 0.05 + 1;
    pace->tokens += pace->per_s * factor * (double)(now - pace->last_ns) * 1e-9;
    pace->last_ns = now;
    if (pace->tokens > most)
        pace->tokens = most;
    uint64_t due = (uint64_t)pace->tokens;
    pace->tokens -= (double)due;
    return due;
}
