/* A working set that knows what it must hold: a lost, stale or torn page is found by whoever touches or checks it.
 * A page found wrong is put right, so that each fault counts once. The caller holds the lock. */
#include "guestload.h"

#include <string.h>
#include <sys/mman.h>

atomic_ullong mem_errors;

static uint64_t sealed(const struct pages *pages, uint64_t index, uint32_t generation)
{
    uint64_t check = mix64(pages->recipe.seed + (index << 32 | generation)) >> 32;
    return check << 32 | generation;
}

static uint64_t *line_of(const struct pages *pages, uint64_t index, unsigned line)
{
    return pages->words + index * PAGE_WORDS + line * LINE_WORDS;
}

/* Says false when there is not enough memory; `pages` is then empty. */
bool pages_make(struct pages *pages, uint64_t count, struct recipe recipe)
{
    memset(pages, 0, sizeof *pages);
    void *words = mmap(NULL, count * PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    void *generations = mmap(NULL, count * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (words == MAP_FAILED || generations == MAP_FAILED) {
        if (words != MAP_FAILED)
            munmap(words, count * PAGE_BYTES);
        if (generations != MAP_FAILED)
            munmap(generations, count * 8);
        return false;
    }
    *pages = (struct pages){.recipe = recipe, .words = words, .generations = generations, .count = count};
    for (uint64_t index = 0; index < count; index++) {
        for (unsigned line = 0; line < PAGE_LINES; line++)
            make_line(&recipe, index, line, 0, line_of(pages, index, line));
        pages->generations[index] = sealed(pages, index, 0);
    }
    return true;
}

void pages_free(struct pages *pages)
{
    if (pages->count) {
        munmap(pages->words, pages->count * PAGE_BYTES);
        munmap(pages->generations, pages->count * 8);
    }
    memset(pages, 0, sizeof *pages);
}

/* Which kind of wrong a line is; `generation` is the one it should have. */
static const char *kind_of_fault(const struct pages *pages, uint64_t index, unsigned line, uint32_t generation)
{
    static const uint64_t zeros[LINE_WORDS];
    const uint64_t *found = line_of(pages, index, line);
    uint64_t other[LINE_WORDS];
    uint32_t step = pages->recipe.whole_page ? 1 : PAGE_LINES;

    if (!memcmp(found, zeros, LINE_BYTES))
        return "zeroed";
    for (uint32_t back = 1; back <= 64 && (uint64_t)back * step <= generation; back++) {
        make_line(&pages->recipe, index, line, generation - back * step, other);
        if (!memcmp(found, other, LINE_BYTES))
            return "stale";
    }
    make_line(&pages->recipe, index, line, 0, other);
    if (!memcmp(found, other, LINE_BYTES))
        return "stale";
    for (uint32_t ahead = 1; ahead <= 64; ahead++) {
        /* Line 0's first rewrite is generation 64; any other line's is its own number. */
        uint32_t later = generation ? generation + ahead * step : (ahead - 1) * step + (step == 1 ? 1 : line);
        make_line(&pages->recipe, index, line, later, other);
        if (!memcmp(found, other, LINE_BYTES))
            return "generation-stale";
    }
    return "foreign";
}

static uint32_t generation_of(struct pages *pages, uint64_t index)
{
    uint64_t entry = pages->generations[index];
    uint32_t generation = (uint32_t)entry;
    if (entry == sealed(pages, index, generation))
        return generation;
    complain(&mem_errors, "mem generation of page %llu is damaged: %016llx", (unsigned long long)index,
             (unsigned long long)entry);
    pages->generations[index] = sealed(pages, index, generation);
    return generation;
}

static bool line_holds(const struct pages *pages, uint64_t index, unsigned line, uint32_t generation)
{
    uint64_t expected[LINE_WORDS];
    uint64_t different = 0;
    const uint64_t *found = line_of(pages, index, line);
    make_line(&pages->recipe, index, line, generation, expected);
    for (int i = 0; i < LINE_WORDS; i++)
        different |= expected[i] ^ found[i];
    return !different;
}

static void write_line(struct pages *pages, uint64_t index, unsigned line, uint32_t generation)
{
    uint64_t *words = line_of(pages, index, line);
    if (pages->recipe.content == CONTENT_ZERO)
        *(volatile uint64_t *)words = generation; /* dirties the page although it ends as it was */
    make_line(&pages->recipe, index, line, generation, words);
}

/* True when page `index` holds what it must; else counts, reports and repairs it. */
bool pages_check(struct pages *pages, uint64_t index)
{
    uint64_t before = atomic_load(&mem_errors);
    uint32_t generation = generation_of(pages, index);
    unsigned wrong = 0, first = 0;
    const char *kind = "";
    for (unsigned line = 0; line < PAGE_LINES; line++) {
        uint32_t expected = line_generation(&pages->recipe, generation, line);
        if (line_holds(pages, index, line, expected))
            continue;
        if (!wrong++) {
            first = line;
            kind = kind_of_fault(pages, index, line, expected);
        }
        write_line(pages, index, line, expected);
    }
    if (wrong) {
        if (pages->recipe.whole_page && wrong < PAGE_LINES && !strcmp(kind, "stale"))
            kind = "torn";
        complain(&mem_errors, "mem page=%llu address=%p kind=%s lines=%u first=%u generation=%u",
                 (unsigned long long)index, (void *)line_of(pages, index, 0), kind, wrong, first, generation);
    }
    return before == atomic_load(&mem_errors);
}

/* Rewrites what the next generation of the page rewrites; checks it first, as afterwards nobody could. */
void pages_touch(struct pages *pages, uint64_t index)
{
    uint32_t next = generation_of(pages, index) + 1;
    unsigned line = next % PAGE_LINES, end = line + 1;
    if (pages->recipe.whole_page) {
        line = 0;
        end = PAGE_LINES;
    }
    for (unsigned i = line; i < end; i++) {
        if (!line_holds(pages, index, i, line_generation(&pages->recipe, next - 1, i))) {
            pages_check(pages, index);
            break;
        }
    }
    for (unsigned i = line; i < end; i++)
        write_line(pages, index, i, next);
    pages->generations[index] = sealed(pages, index, next);
    pages->touches++;
}

/* Finds a page that went back in time together with its generation: then the sum is short. */
bool pages_check_sum(struct pages *pages)
{
    uint64_t sum = 0;
    for (uint64_t index = 0; index < pages->count; index++)
        sum += (uint32_t)pages->generations[index];
    if (sum == pages->touches)
        return true;
    complain(&mem_errors, "mem touches=%llu but the generations add up to %llu",
             (unsigned long long)pages->touches, (unsigned long long)sum);
    pages->touches = sum;
    return false;
}
