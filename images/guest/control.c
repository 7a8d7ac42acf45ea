/* The control protocol: ping, stat, and the loads' own commands. `ok key=value ...` or `error words`. */
#include "guestload.h"

#include <stdio.h>
#include <string.h>

static int stat_command(char *reply, size_t room)
{
    char boot[40] = "unknown";
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (file) {
        if (fscanf(file, "%39s", boot) != 1)
            strcpy(boot, "unknown");
        fclose(file);
    }
    int length = snprintf(reply, room, "ok boot=%s uptime_ms=%llu connections=%d requests=%llu", boot,
                          (unsigned long long)now_ns() / 1000000, atomic_load(&connections_open),
                          (unsigned long long)atomic_load(&lines_answered));
    length += mem_stat(reply + length, room - (size_t)length);
    length += disk_stat(reply + length, room - (size_t)length);
    length += heartbeat_stat(reply + length, room - (size_t)length);
    return length;
}

int control(char *line, char *reply, size_t room)
{
    char *words[MAX_WORDS];
    int count = split_words(line, " \t", words);
    if (!count)
        return failed(reply, room, "empty request");
    if (!strcmp(words[0], "ping"))
        return snprintf(reply, room, "ok");
    if (!strcmp(words[0], "stat"))
        return stat_command(reply, room);
    if (!strcmp(words[0], "mem"))
        return mem_command(words + 1, count - 1, reply, room);
    if (!strcmp(words[0], "disk"))
        return disk_command(words + 1, count - 1, reply, room);
    if (!strcmp(words[0], "heartbeat"))
        return heartbeat_command(words + 1, count - 1, reply, room);
    if (!strcmp(words[0], "talk"))
        return talk_command(words + 1, count - 1, reply, room);
    return failed(reply, room, "unknown request '%.32s'", words[0]);
}

int control_answer(struct session *session, char *line, char *reply, size_t room)
{
    (void)session;
    return control(line, reply, room);
}
