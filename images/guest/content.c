/* What must a page hold? A function of (fill, page, line, generation) alone, so that nothing has to be remembered
 * but how often each page was touched. */
#include "guestload.h"

#include <string.h>

const char *const content_names[] = {"zero", "text", "random", NULL};

/* 64 words of 8 bytes: a line is 8 of them, 48 random bits in 64 bytes, which zlib and zstd take down about 4 : 1. */
static const char dictionary[64 * 8 + 1] =
    "machine " "memory, " "between " "another " "because " "through " "nothing " "standby "
    "primary " "running " "pausing " "restore " "capture " "network " "storage " "kernel, "
    "process " "virtual " "address " "pointer " "counter " "journal " "barrier " "request "
    "replies " "timeout " "failure " "cluster " "monitor " "balloon " "channel " "threads "
    "hundred " "seconds " "percent " "average " "maximum " "minimum " "records " "sectors "
    "buffers " "streams " "packets " "bridges " "routers " "devices " "drivers " "modules "
    "systems " "domains " "regions " "mapping " "writing " "reading " "copying " "sending "
    "waiting " "started " "stopped " "resumed " "leased, " "fenced, " "dirtied " "cleaned ";

/* The touch that wrote `line` last. Touch g rewrites the whole page, or line g % 64; the fill is generation 0. */
uint32_t line_generation(const struct recipe *recipe, uint32_t page_generation, unsigned line)
{
    if (recipe->whole_page)
        return page_generation;
    uint32_t behind = (page_generation - line) & (PAGE_LINES - 1);
    return page_generation >= behind ? page_generation - behind : 0;
}

void make_line(const struct recipe *recipe, uint64_t page, unsigned line, uint32_t generation,
               uint64_t out[LINE_WORDS])
{
    /* Of the zero pages every 64th is random: a working set of zeros alone could not show a lost write. */
    if (recipe->content == CONTENT_ZERO && page % 64 != 63) {
        memset(out, 0, LINE_BYTES);
        return;
    }
    uint64_t state = mix64(recipe->seed ^ ((page << 6 | line) + ((uint64_t)generation << 32)));
    if (recipe->content == CONTENT_TEXT) {
        for (int i = 0; i < LINE_WORDS; i++, state >>= 6)
            memcpy(&out[i], dictionary + 8 * (state & 63), 8);
        return;
    }
    state |= 1; /* xorshift stays at 0 */
    for (int i = 0; i < LINE_WORDS; i++)
        out[i] = xorshift(&state);
}
