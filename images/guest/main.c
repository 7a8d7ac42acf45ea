/* Starts the loads that the kernel command line asks for and the services, says VK-READY, then ticks. */
#include "guestload.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <signal.h>
#include <unistd.h>

_Noreturn void die(const char *what)
{
    perror(what);
    exit(1);
}

void start_thread(void *(*body)(void *), void *argument)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, body, argument))
        die("cannot start a thread");
    pthread_detach(thread);
}

/* Gives a parameter's value to the command it stands for: vk.mem=rate=20M,set=1G is `mem rate=20M set=1G`. */
static void apply(const char *command, const char *value)
{
    char line[512], reply[512];
    snprintf(line, sizeof line, "%s %s", command, value);
    for (char *c = line; *c; c++)
        if (*c == ',' || *c == '"')
            *c = ' ';
    control(line, reply, sizeof reply);
    printf("VK-BOOT %s: %s\n", command, reply);
}

static void apply_kernel_parameters(char *cmdline)
{
    char *words[MAX_WORDS];
    int count = split_words(cmdline, " \n", words);
    for (int i = 0; i < count; i++) {
        char beat[64];
        if (!strncmp(words[i], "vk.heartbeat=", 13)) {
            snprintf(beat, sizeof beat, "dest=%.40s", words[i] + 13);
            apply("heartbeat", beat);
        } else if (!strncmp(words[i], "vk.mem=", 7)) {
            apply("mem", words[i] + 7);
        } else if (!strncmp(words[i], "vk.disk=", 8)) {
            apply("disk", words[i] + 8);
        }
    }
}

int main(int argc, char **argv)
{
    if (argc > 1 && !strcmp(argv[1], "device-job"))
        return device_job(argc - 1, argv + 1);
    char cmdline[4096] = "";
    int fd = open("/proc/cmdline", O_RDONLY | O_CLOEXEC);
    if (fd < 0 || read(fd, cmdline, sizeof cmdline - 1) < 0)
        die("/proc/cmdline");
    close(fd);
    setvbuf(stdout, NULL, _IOLBF, 512); /* one write for one line, so that lines stay whole */
    signal(SIGPIPE, SIG_IGN);
    const char *id = strstr(cmdline, "vk.id=");

    memload_start();
    diskload_start(argc > 1 ? argv[1] : "/dev/vda");
    uint32_t number = id ? (uint32_t)strtoul(id + 6, NULL, 10) : 0;
    heartbeat_start(number);
    talk_start(number);
    button_start();
    apply_kernel_parameters(cmdline);
    serve_tcp(7000, control_answer);
    serve_tcp(7001, keyvalue_answer);
    serve_port("vk.control", control_answer);
    printf("VK-READY\n");
    for (unsigned long long tick = 1;; tick++) {
        sleep_us(1000000);
        printf("VK tick=%llu mem_errors=%llu disk_errors=%llu disk_seq=%llu\n", tick,
               (unsigned long long)atomic_load(&mem_errors), (unsigned long long)atomic_load(&disk_errors),
               (unsigned long long)atomic_load(&disk_acknowledged));
    }
}
