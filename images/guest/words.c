/* Requests and parameters as words; errors as replies and as lines on the console. */
#include "guestload.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int split_words(char *line, const char *separators, char *words[MAX_WORDS])
{
    int count = 0;
    char *rest = NULL;
    for (char *word = strtok_r(line, separators, &rest); word && count < MAX_WORDS;
         word = strtok_r(NULL, separators, &rest))
        words[count++] = word;
    return count;
}

/* Cuts `key=value` in two in place. */
bool option(char *word, char **key, char **value)
{
    char *equals = strchr(word, '=');
    if (!equals || equals == word)
        return false;
    *equals = 0;
    *key = word;
    *value = equals + 1;
    return true;
}

/* `512`, `64K`, `20M`, `1G`: powers of 1024. */
bool parse_bytes(const char *text, uint64_t *bytes)
{
    char *end;
    if (*text < '0' || *text > '9')
        return false;
    uint64_t value = strtoull(text, &end, 10);
    int shift = *end == 'K' ? 10 : *end == 'M' ? 20 : *end == 'G' ? 30 : 0;
    if (shift)
        end++;
    if (*end || value > (UINT64_MAX >> 1) >> shift)
        return false;
    *bytes = value << shift;
    return true;
}

bool parse_choice(const char *text, const char *const *names, int *choice)
{
    for (int i = 0; names[i]; i++) {
        if (!strcmp(names[i], text)) {
            *choice = i;
            return true;
        }
    }
    return false;
}

int failed(char *reply, size_t room, const char *format, ...)
{
    va_list arguments;
    int length = snprintf(reply, room, "error ");
    va_start(arguments, format);
    length += vsnprintf(reply + length, room - (size_t)length, format, arguments);
    va_end(arguments);
    return length;
}

/* Counts a fault and says it on the console; after the first 50 of a counter only counts, not to drown the rest. */
void complain(atomic_ullong *counter, const char *format, ...)
{
    if (atomic_fetch_add(counter, 1) >= 50)
        return;
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    printf("VK-ERROR %s\n", text);
}
