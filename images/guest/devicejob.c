/* A job whose state is in a PCI device: QEMU's edu stands in for a GPU, these requests for its vendor's tool.
 *
 * `guestload device-job` counts in the device's own registers, and nowhere else, for as long as it lives.
 * `guestload device-job ask REQUEST` has it do something: lock, checkpoint, restore, unlock, abort, stat. */
#include "guestload.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { BAR_BYTES = 1 << 20, LIVENESS = 0x04, COUNT = 0x80, PROOF = 0x88 };
static const char *const PATH = "/run/device-job.sock";
static const char *const states[] = {"running", "locked", "checkpointed"};

static struct {
    pthread_mutex_t mutex;
    volatile uint8_t *bar;
    enum { RUNNING, LOCKED, CHECKPOINTED } state;
    uint64_t saved, seed, errors;
} job = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static uint64_t get(unsigned offset) { return *(volatile uint64_t *)(job.bar + offset); }
static void put(unsigned offset, uint64_t value) { *(volatile uint64_t *)(job.bar + offset) = value; }

static bool holds(const char *directory, const char *name, const char *wanted)
{
    char path[400], text[16] = "";
    snprintf(path, sizeof path, "%s/%s", directory, name);
    FILE *file = fopen(path, "re");
    if (!file)
        return false;
    bool same = fscanf(file, "%15s", text) == 1 && !strcmp(text, wanted);
    fclose(file);
    return same;
}

/* The device's registers, wherever it is plugged now; NULL when there is none that answers. */
static volatile uint8_t *opened(void)
{
    volatile uint8_t *found = NULL;
    DIR *devices = opendir("/sys/bus/pci/devices");
    for (struct dirent *entry; devices && !found && (entry = readdir(devices));) {
        char directory[300], path[400];
        snprintf(directory, sizeof directory, "/sys/bus/pci/devices/%s", entry->d_name);
        if (!holds(directory, "vendor", "0x1234") || !holds(directory, "device", "0x11e8"))
            continue;
        snprintf(path, sizeof path, "%s/enable", directory);
        int fd = holds(directory, "enable", "0") ? open(path, O_WRONLY | O_CLOEXEC) : -1;
        if (fd >= 0) {
            if (write(fd, "1", 1) != 1)
                perror(path);
            close(fd);
        }
        snprintf(path, sizeof path, "%s/resource0", directory);
        fd = open(path, O_RDWR | O_CLOEXEC);
        if (fd < 0)
            continue;
        void *bar = mmap(NULL, BAR_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
        if (bar == MAP_FAILED)
            continue;
        found = bar;
        *(volatile uint32_t *)(found + LIVENESS) = 0x5a5a1234;
        if (*(volatile uint32_t *)(found + LIVENESS) != ~0x5a5a1234u) {
            munmap(bar, BAR_BYTES);
            found = NULL;
        }
    }
    if (devices)
        closedir(devices);
    return found;
}

static void keep(uint64_t count)
{
    put(COUNT, count);
    put(PROOF, mix64(count ^ job.seed));
}

static void *count_up(void *unused)
{
    (void)unused;
    for (;; sleep_us(10000)) {
        pthread_mutex_lock(&job.mutex);
        if (job.state == RUNNING) {
            uint64_t count = get(COUNT);
            if (get(PROOF) != mix64(count ^ job.seed))
                job.errors++; /* and it stays wrong: no count is made up */
            else
                keep(count + 1);
        }
        pthread_mutex_unlock(&job.mutex);
    }
    return NULL;
}

/* Out of the device into memory; the device is let go, and keeps nothing. */
static const char *checkpoint(void)
{
    if (job.state == RUNNING)
        return "not locked";
    if (job.state == LOCKED) {
        uint64_t count = get(COUNT);
        if (get(PROOF) != mix64(count ^ job.seed))
            return "the device lost its state";
        job.saved = count;
        put(COUNT, 0);
        put(PROOF, 0);
        munmap((void *)job.bar, BAR_BYTES);
        job.bar = NULL;
        job.state = CHECKPOINTED;
    }
    return NULL;
}

static const char *restore(void)
{
    if (job.state == CHECKPOINTED) {
        job.bar = opened();
        if (!job.bar)
            return "there is no device";
        keep(job.saved);
        job.state = LOCKED;
    }
    return NULL;
}

static const char *unlock(void)
{
    if (job.state == CHECKPOINTED)
        return "not restored";
    job.state = RUNNING;
    return NULL;
}

static const char *obeyed(const char *request)
{
    if (!strcmp(request, "lock"))
        job.state = job.state == RUNNING ? LOCKED : job.state;
    else if (!strcmp(request, "checkpoint"))
        return checkpoint();
    else if (!strcmp(request, "restore"))
        return restore();
    else if (!strcmp(request, "unlock"))
        return unlock();
    else if (!strcmp(request, "abort")) {
        const char *failure = restore();
        return failure ? failure : unlock();
    } else if (strcmp(request, "stat"))
        return "unknown request";
    return NULL;
}

static int serve(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strcpy(address.sun_path, PATH);
    unlink(PATH);
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 8))
        die(PATH);
    job.seed = now_ns();
    job.bar = opened();
    if (!job.bar)
        die("no device");
    keep(0);
    start_thread(count_up, NULL);
    for (;;) {
        char request[40] = "", reply[200];
        int fd = accept(listener, NULL, NULL);
        if (fd < 0)
            continue;
        if (read(fd, request, sizeof request - 1) > 0) {
            pthread_mutex_lock(&job.mutex);
            const char *failure = obeyed(request);
            uint64_t count = job.bar ? get(COUNT) : job.saved;
            int length = failure ? snprintf(reply, sizeof reply, "error %s\n", failure)
                                 : snprintf(reply, sizeof reply, "ok state=%s count=%llu errors=%llu pid=%d\n",
                                            states[job.state], (unsigned long long)count,
                                            (unsigned long long)job.errors, getpid());
            pthread_mutex_unlock(&job.mutex);
            if (write(fd, reply, (size_t)length) != length)
                perror("reply");
        }
        close(fd);
    }
}

static int ask(const char *request)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    char reply[200] = "";
    strcpy(address.sun_path, PATH);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(fd, (struct sockaddr *)&address, sizeof address) ||
        write(fd, request, strlen(request)) < 0 || read(fd, reply, sizeof reply - 1) <= 0) {
        fprintf(stderr, "the job does not answer\n");
        return 2;
    }
    bool well = !strncmp(reply, "ok", 2);
    fputs(reply, well ? stdout : stderr);
    return well ? 0 : 1;
}

int device_job(int argc, char **argv)
{
    return argc == 3 && !strcmp(argv[1], "ask") ? ask(argv[2]) : serve();
}
