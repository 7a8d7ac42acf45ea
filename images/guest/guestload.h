/* guestload: the load and the witness inside the test guest. One file answers one question; see ../README.md. */
#ifndef GUESTLOAD_H
#define GUESTLOAD_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { PAGE_BYTES = 4096, LINE_BYTES = 64, PAGE_LINES = 64, LINE_WORDS = 8, PAGE_WORDS = 512 };

/* clock.c: time, pace, and the small deterministic generator that everything uses */
struct pace {
    double per_s;   /* tokens a second */
    double tokens;  /* those not yet spent */
    uint64_t last_ns;
};

uint64_t now_ns(void);
void sleep_us(unsigned us);
uint64_t mix64(uint64_t x);
uint64_t xorshift(uint64_t *state);
uint64_t pace_due(struct pace *pace, double factor);

/* words.c: requests and parameters as words */
enum { MAX_WORDS = 64 };
int split_words(char *line, const char *separators, char *words[MAX_WORDS]);
bool option(char *word, char **key, char **value);
bool parse_bytes(const char *text, uint64_t *bytes);
bool parse_choice(const char *text, const char *const *names, int *choice);
int failed(char *reply, size_t room, const char *format, ...) __attribute__((format(printf, 3, 4)));
void complain(atomic_ullong *counter, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* content.c: what must a page hold? */
enum content { CONTENT_ZERO, CONTENT_TEXT, CONTENT_RANDOM };
extern const char *const content_names[];

struct recipe {
    uint64_t seed;        /* differs with every fill, so that pages of an earlier fill are found too */
    int content;          /* enum content */
    bool whole_page;      /* a touch rewrites the page, else one line of it */
};

uint32_t line_generation(const struct recipe *recipe, uint32_t page_generation, unsigned line);
void make_line(const struct recipe *recipe, uint64_t page, unsigned line, uint32_t generation,
               uint64_t out[LINE_WORDS]);

/* pages.c: a working set that knows what it must hold */
struct pages {
    struct recipe recipe;
    uint64_t *words;        /* page i begins at words + i * PAGE_WORDS */
    uint64_t *generations;  /* low half: how often page i was touched; high half: a check of that */
    uint64_t count;
    uint64_t touches;       /* since the fill: the sum of all generations */
};

extern atomic_ullong mem_errors;
bool pages_make(struct pages *pages, uint64_t count, struct recipe recipe);
void pages_free(struct pages *pages);
void pages_touch(struct pages *pages, uint64_t index);
bool pages_check(struct pages *pages, uint64_t index);
bool pages_check_sum(struct pages *pages);

/* memload.c: which pages, how often, and is all of it still right? */
void memload_start(void);
int mem_command(char **words, int count, char *reply, size_t room);
int mem_stat(char *reply, size_t room);

/* records.c: one record and the ring's header on the disk */
enum { RECORD_BYTES = 4096 };
struct record;
void record_make(struct record *record, uint64_t ring, uint64_t sequence);
uint64_t record_sequence(const struct record *record, uint64_t ring);
void ring_header_make(struct record *record, uint64_t ring, uint64_t slots);
bool ring_header_read(const struct record *record, uint64_t *ring, uint64_t *slots);

/* diskload.c: is every acknowledged record still there, and whole? */
extern atomic_ullong disk_errors, disk_acknowledged;
void diskload_start(const char *path);
int disk_command(char **words, int count, char *reply, size_t room);
int disk_stat(char *reply, size_t room);

/* heartbeat.c: was the guest alive at this millisecond? */
void heartbeat_start(uint32_t id);
int heartbeat_command(char **words, int count, char *reply, size_t room);
int heartbeat_stat(char *reply, size_t room);

/* talk.c: what has each guest said to each other, and heard? */
void talk_start(uint32_t id);
int talk_command(char **words, int count, char *reply, size_t room);

/* lines.c: one line in, one line out, over TCP or a virtio-serial port */
enum { LINE_ROOM = 4096 };
struct session {
    int fd;
    uint64_t requests;  /* those answered on this connection, this one included */
    size_t used;
    char line[LINE_ROOM];
};
typedef int answer_fn(struct session *session, char *line, char *reply, size_t room);

extern atomic_ullong lines_answered;
extern atomic_int connections_open;
void serve_tcp(int port, answer_fn *answer);
void serve_port(const char *name, answer_fn *answer);

/* control.c, keyvalue.c: what the two services say */
answer_fn control_answer, keyvalue_answer;
int control(char *line, char *reply, size_t room);

/* button.c: the power button ends the guest */
void button_start(void);

/* devicejob.c: a job whose state is in a PCI device */
int device_job(int argc, char **argv);

/* main.c */
void start_thread(void *(*body)(void *), void *argument);
_Noreturn void die(const char *what);

#endif
