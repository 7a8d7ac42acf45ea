/* Which pages, how often, and is all of it still right? One thread dirties the working set at a set rate, one checks
 * it page by page in the background; `mem verify` checks all of it at once. */
#include "guestload.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum pattern { UNIFORM, SEQUENTIAL, ZIPF, BURSTY, PHASES };
static const char *const pattern_names[] = {"uniform", "sequential", "zipf", "bursty", "phases", NULL};
static const char *const touch_names[] = {"line", "page", NULL};

struct settings {
    uint64_t rate_bytes_per_s; /* 4096 for each touch, whatever the touch rewrites */
    uint64_t set_bytes;
    int pattern, content, touch;
    uint64_t verify_percent;   /* of one CPU, for the background check */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_int waiting;     /* for the lock: the writer, never long without it, steps back */
static struct settings settings = {20 << 20, 64 << 20, UNIFORM, CONTENT_RANDOM, 0, 2};
static bool writing;
static struct pages pages;
static struct pace pace;
static uint64_t started_ns, cursor, random_state = 88172645463325252u;
static atomic_ullong stat_pages, stat_touches, stat_checked, stat_rate;

static void take(void)
{
    atomic_fetch_add(&waiting, 1);
    pthread_mutex_lock(&lock);
    atomic_fetch_sub(&waiting, 1);
}

static uint64_t below(uint64_t count)
{
    return (uint64_t)((unsigned __int128)xorshift(&random_state) * count >> 64);
}

/* Rank r with a chance of about 1 / r (Zipf, s = 1): a binary order of magnitude, then a rank within it. */
static uint64_t zipf_rank(uint64_t count)
{
    unsigned orders = 64 - (unsigned)__builtin_clzll(count);
    for (;;) {
        uint64_t low = 1ull << below(orders);
        uint64_t rank = low + below(low);
        if (rank <= count)
            return rank - 1;
    }
}

/* Seconds into the cycle of `bursty` (4 s) and `phases` (15 s). */
static double cycle_s(double period_s)
{
    double s = (double)(now_ns() - started_ns) * 1e-9;
    return s - period_s * (double)(uint64_t)(s / period_s);
}

/* bursty: 1 s at four times the rate, 3 s of rest. phases: 5 s at the rate, 5 s on an eighth, 5 s at a tenth. */
static double rate_factor(void)
{
    if (settings.pattern == BURSTY)
        return cycle_s(4) < 1 ? 4 : 0;
    if (settings.pattern == PHASES)
        return cycle_s(15) < 10 ? 1 : 0.1;
    return 1;
}

static uint64_t next_page(bool narrow)
{
    switch (settings.pattern) {
    case SEQUENTIAL:
        return cursor = cursor + 1 < pages.count ? cursor + 1 : 0;
    case ZIPF: /* the factor is a prime above any count: it scatters the hot pages and keeps them apart */
        return zipf_rank(pages.count) * 2654435761u % pages.count;
    case PHASES:
        return below(narrow ? (pages.count + 7) / 8 : pages.count);
    default:
        return below(pages.count);
    }
}

static void *write_pages(void *unused)
{
    (void)unused;
    for (;;) {
        take();
        double factor = writing ? rate_factor() : 0;
        uint64_t due = writing ? pace_due(&pace, factor) : 0;
        bool narrow = settings.pattern == PHASES && cycle_s(15) >= 5;
        pthread_mutex_unlock(&lock);
        while (due) {
            uint64_t batch = due < 32 ? due : 32;
            due -= batch;
            take();
            for (uint64_t i = 0; writing && i < batch; i++)
                pages_touch(&pages, next_page(narrow));
            atomic_store(&stat_touches, pages.touches);
            pthread_mutex_unlock(&lock);
            if (atomic_load(&waiting))
                sleep_us(50);
        }
        sleep_us(2000);
    }
    return NULL;
}

static void *check_pages(void *unused)
{
    (void)unused;
    uint64_t index = 0;
    for (;;) {
        take();
        uint64_t began = now_ns();
        uint64_t share = settings.verify_percent;
        for (int i = 0; share && pages.count && i < 16; i++, index++) {
            if (index >= pages.count)
                index = 0;
            pages_check(&pages, index);
            atomic_fetch_add(&stat_checked, 1);
        }
        uint64_t busy_us = (now_ns() - began) / 1000;
        pthread_mutex_unlock(&lock);
        uint64_t rest_us = share ? busy_us * (100 - share) / share : 100000;
        sleep_us((unsigned)(rest_us < 1000 ? 1000 : rest_us > 500000 ? 500000 : rest_us));
    }
    return NULL;
}

static uint64_t memory_free_bytes(void)
{
    unsigned long long kib = 0;
    char line[128];
    FILE *file = fopen("/proc/meminfo", "re");
    while (file && fgets(line, sizeof line, file) && sscanf(line, "MemAvailable: %llu", &kib) != 1) {
    }
    if (file)
        fclose(file);
    return kib << 10;
}

/* Reads the words into `wanted`; says the word that it cannot read, or NULL. */
static const char *read_settings(char **words, int count, struct settings *wanted)
{
    for (int i = 0; i < count; i++) {
        char *key, *value;
        if (!option(words[i], &key, &value))
            return words[i];
        bool good = false;
        if (!strcmp(key, "rate"))
            good = parse_bytes(value, &wanted->rate_bytes_per_s);
        else if (!strcmp(key, "set"))
            good = parse_bytes(value, &wanted->set_bytes) && wanted->set_bytes >= PAGE_BYTES;
        else if (!strcmp(key, "pattern"))
            good = parse_choice(value, pattern_names, &wanted->pattern);
        else if (!strcmp(key, "content"))
            good = parse_choice(value, content_names, &wanted->content);
        else if (!strcmp(key, "touch"))
            good = parse_choice(value, touch_names, &wanted->touch);
        else if (!strcmp(key, "verify"))
            good = parse_bytes(value, &wanted->verify_percent) && wanted->verify_percent <= 100;
        if (!good)
            return key;
    }
    return NULL;
}

/* Only another set, content or touch needs new pages; rate, pattern and verify change under the running load. */
static bool needs_new_pages(const struct settings *wanted)
{
    return !pages.count || wanted->set_bytes != settings.set_bytes || wanted->content != settings.content ||
           wanted->touch != settings.touch;
}

static int mem_begin(char **words, int count, char *reply, size_t room)
{
    struct settings wanted = settings;
    const char *bad = read_settings(words, count, &wanted);
    if (bad)
        return failed(reply, room, "mem: cannot read '%s'", bad);
    if (needs_new_pages(&wanted)) {
        /* The working set is not to be the reason why the guest runs out of memory. */
        uint64_t most = (memory_free_bytes() + pages.count * PAGE_BYTES) / 10 * 9;
        if (wanted.set_bytes > most)
            return failed(reply, room, "mem: set is larger than 90%% of the free memory (%llu MiB)",
                          (unsigned long long)most >> 20);
        pages_free(&pages);
        struct recipe recipe = {mix64(now_ns()), wanted.content, wanted.touch == 1};
        if (!pages_make(&pages, wanted.set_bytes / PAGE_BYTES, recipe)) {
            writing = false;
            return failed(reply, room, "mem: no memory for the set");
        }
        cursor = 0;
    }
    settings = wanted;
    started_ns = now_ns();
    pace = (struct pace){(double)settings.rate_bytes_per_s / PAGE_BYTES, 0, started_ns};
    writing = settings.rate_bytes_per_s > 0;
    atomic_store(&stat_pages, pages.count);
    atomic_store(&stat_touches, pages.touches);
    atomic_store(&stat_rate, settings.rate_bytes_per_s);
    return snprintf(reply, room, "ok pages=%llu rate=%llu pattern=%s content=%s touch=%s",
                    (unsigned long long)pages.count, (unsigned long long)settings.rate_bytes_per_s,
                    pattern_names[settings.pattern], content_names[settings.content],
                    touch_names[settings.touch]);
}

static int mem_verify(char *reply, size_t room)
{
    uint64_t began = now_ns(), wrong = 0;
    for (uint64_t index = 0; index < pages.count; index++)
        wrong += !pages_check(&pages, index);
    bool sum_right = pages_check_sum(&pages);
    return snprintf(reply, room, "ok pages=%llu wrong=%llu sum_right=%d errors=%llu touches=%llu took_ms=%llu",
                    (unsigned long long)pages.count, (unsigned long long)wrong, sum_right,
                    (unsigned long long)atomic_load(&mem_errors), (unsigned long long)pages.touches,
                    (unsigned long long)(now_ns() - began) / 1000000);
}

/* `mem off` | `mem verify` | `mem [rate=] [set=] [pattern=] [content=] [touch=] [verify=]` */
int mem_command(char **words, int count, char *reply, size_t room)
{
    int length;
    take();
    if (count == 1 && !strcmp(words[0], "off")) {
        writing = false;
        atomic_store(&stat_rate, 0);
        length = snprintf(reply, room, "ok touches=%llu", (unsigned long long)pages.touches);
    } else if (count == 1 && !strcmp(words[0], "verify")) {
        length = mem_verify(reply, room);
    } else {
        length = mem_begin(words, count, reply, room);
    }
    pthread_mutex_unlock(&lock);
    return length;
}

int mem_stat(char *reply, size_t room)
{
    return snprintf(reply, room, " mem_pages=%llu mem_rate=%llu mem_touches=%llu mem_checked=%llu mem_errors=%llu",
                    (unsigned long long)atomic_load(&stat_pages), (unsigned long long)atomic_load(&stat_rate),
                    (unsigned long long)atomic_load(&stat_touches),
                    (unsigned long long)atomic_load(&stat_checked),
                    (unsigned long long)atomic_load(&mem_errors));
}

void memload_start(void)
{
    start_thread(write_pages, NULL);
    start_thread(check_pages, NULL);
}
