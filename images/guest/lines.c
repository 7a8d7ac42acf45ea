/* One line in, one line out, over TCP connections that stay open or over a virtio-serial port. */
#include "guestload.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

enum { MAX_SESSIONS = 512 };

struct service {
    int listener;
    const char *name; /* of the virtio-serial port, where there is no listener */
    answer_fn *answer;
};

atomic_ullong lines_answered;
atomic_int connections_open;

static bool write_whole(int fd, const char *bytes, size_t count)
{
    while (count) {
        ssize_t done = write(fd, bytes, count);
        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            return false;
        bytes += done;
        count -= (size_t)done;
    }
    return true;
}

/* Answers every whole line in the session's buffer; false when the other end cannot be written to any more. */
static bool answer_lines(struct session *session, answer_fn *answer)
{
    static _Thread_local char reply[LINE_ROOM + 64];
    char *end;
    while ((end = memchr(session->line, '\n', session->used))) {
        size_t taken = (size_t)(end - session->line) + 1;
        *end = 0;
        if (end > session->line && end[-1] == '\r')
            end[-1] = 0;
        session->requests++;
        int length = answer(session, session->line, reply, sizeof reply - 1);
        if (length > (int)sizeof reply - 2)
            length = (int)sizeof reply - 2;
        reply[length] = '\n';
        atomic_fetch_add(&lines_answered, 1);
        if (!write_whole(session->fd, reply, (size_t)length + 1))
            return false;
        session->used -= taken;
        memmove(session->line, session->line + taken, session->used);
    }
    return true;
}

/* Reads once and answers; false at the end, after an error, or when a line is too long. */
static bool serve_once(struct session *session, answer_fn *answer)
{
    ssize_t got = read(session->fd, session->line + session->used, sizeof session->line - session->used);
    if (got <= 0)
        return got < 0 && (errno == EINTR || errno == EAGAIN);
    session->used += (size_t)got;
    return answer_lines(session, answer) && session->used < sizeof session->line;
}

static struct session *accept_session(int listener)
{
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0)
        return NULL;
    struct session *session = calloc(1, sizeof *session);
    if (!session) {
        close(fd);
        return NULL;
    }
    int on = 1;
    struct timeval patience = {5, 0}; /* one client that does not read must not stop the others for ever */
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    session->fd = fd;
    atomic_fetch_add(&connections_open, 1);
    return session;
}

static int listen_on(int port)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (fd < 0 || bind(fd, (struct sockaddr *)&here, sizeof here) < 0 || listen(fd, 64) < 0)
        die("cannot listen");
    return fd;
}

static void *serve_sessions(void *argument)
{
    struct service *service = argument;
    struct session *sessions[MAX_SESSIONS];
    struct pollfd fds[MAX_SESSIONS + 1];
    int count = 0;
    fds[0] = (struct pollfd){service->listener, POLLIN, 0};
    for (;;) {
        fds[0].events = count < MAX_SESSIONS ? POLLIN : 0;
        if (poll(fds, (nfds_t)count + 1, -1) < 0)
            continue;
        for (int i = count - 1; i >= 0; i--) {
            if (!fds[i + 1].revents || serve_once(sessions[i], service->answer))
                continue;
            close(sessions[i]->fd);
            free(sessions[i]);
            atomic_fetch_sub(&connections_open, 1);
            count--;
            sessions[i] = sessions[count];
            fds[i + 1] = fds[count + 1];
        }
        struct session *session = fds[0].revents & POLLIN ? accept_session(fds[0].fd) : NULL;
        if (session) {
            sessions[count++] = session;
            fds[count] = (struct pollfd){session->fd, POLLIN, 0};
        }
    }
    return NULL;
}

static void start_service(int listener, const char *name, void *(*body)(void *), answer_fn *answer)
{
    struct service *service = malloc(sizeof *service);
    if (!service)
        die("no memory for a service");
    *service = (struct service){listener, name, answer};
    start_thread(body, service);
}

/* Returns once clients can connect. */
void serve_tcp(int port, answer_fn *answer)
{
    start_service(listen_on(port), NULL, serve_sessions, answer);
}

/* Opens the virtio-serial port of that name; -1 while there is none. */
static int open_port(const char *name)
{
    static const char root[] = "/sys/class/virtio-ports";
    DIR *ports = opendir(root);
    int found = -1;
    for (struct dirent *entry; ports && found < 0 && (entry = readdir(ports));) {
        char path[512], text[64] = "";
        snprintf(path, sizeof path, "%s/%s/name", root, entry->d_name);
        FILE *file = entry->d_name[0] == '.' ? NULL : fopen(path, "re");
        if (!file)
            continue;
        bool same = fscanf(file, "%63s", text) == 1 && !strcmp(text, name);
        fclose(file);
        snprintf(path, sizeof path, "/dev/%s", entry->d_name);
        if (same)
            found = open(path, O_RDWR | O_CLOEXEC);
    }
    if (ports)
        closedir(ports);
    return found;
}

static void *serve_named_port(void *argument)
{
    struct service *service = argument;
    struct session session = {.fd = -1};
    for (;;) {
        if (session.fd < 0) {
            session = (struct session){.fd = open_port(service->name)};
            if (session.fd < 0)
                sleep_us(1000000); /* it may be plugged in later */
        } else if (!serve_once(&session, service->answer)) {
            /* No host end, or the port was unplugged: half a line is void, and the port is looked for again. */
            close(session.fd);
            session.fd = -1;
            sleep_us(50000);
        }
    }
    return NULL;
}

void serve_port(const char *name, answer_fn *answer)
{
    start_service(-1, name, serve_named_port, answer);
}
