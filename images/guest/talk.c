/* What has each guest said to each other, and what has it heard? Numbered messages to and from other test guests, by
 * UDP and over one TCP connection each way, counted in one page of memory that is found from outside by its beginning:
 * so the counts can be read out of a checkpoint, as of its moment. A message counts as sent before it is. */
#include "guestload.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { TALK_PORT = 7002, MAX_PEERS = 32, MAX_HEARD = 64 };

struct message { /* little endian, as the machine is */
    char magic[4];
    uint32_t id;
    uint64_t sequence;
};
_Static_assert(sizeof(struct message) == 16, "the message is 16 bytes");

struct peer {
    _Atomic uint32_t address; /* network order; 0: nobody */
    uint32_t reserved;
    atomic_ullong udp_sent, udp_heard; /* the last number each way: UDP may lose some */
    atomic_ullong tcp_sent, tcp_heard;
    atomic_ullong wrong; /* a number over TCP that was not the next */
};

static struct {
    char magic[8]; /* written when the page is used, so that no file holds it */
    uint32_t id, room;
    struct peer peers[MAX_PEERS];
} page __attribute__((aligned(4096)));

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic uint64_t rate_per_s;
static bool begun;

static struct peer *peer_of(uint32_t address)
{
    struct peer *found = NULL;
    pthread_mutex_lock(&lock);
    for (int i = 0; !found && i < MAX_PEERS; i++) {
        if (!page.peers[i].address)
            page.peers[i].address = address;
        if (page.peers[i].address == address)
            found = &page.peers[i];
    }
    pthread_mutex_unlock(&lock);
    return found;
}

static int tcp_to(struct sockaddr_in *to)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (connect(fd, (struct sockaddr *)to, sizeof *to) == 0)
        return fd;
    close(fd);
    return -1;
}

static void *speak(void *argument)
{
    struct peer *peer = argument;
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(TALK_PORT)};
    to.sin_addr.s_addr = peer->address;
    int udp = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0), tcp;
    while ((tcp = tcp_to(&to)) < 0)
        sleep_us(200000); /* the other may not be there yet */
    struct pace pace = {.last_ns = now_ns()};
    for (;;) {
        pace.per_s = (double)rate_per_s;
        for (uint64_t due = pace_due(&pace, 1.0); due; due--) {
            struct message message = {"VKTK", page.id, ++peer->udp_sent};
            sendto(udp, &message, sizeof message, 0, (struct sockaddr *)&to, sizeof to);
            message.sequence = ++peer->tcp_sent;
            if (send(tcp, &message, sizeof message, 0) != sizeof message) {
                complain(&peer->wrong, "talk: cut off at %llu", (unsigned long long)message.sequence);
                close(udp);
                close(tcp);
                return NULL;
            }
        }
        sleep_us(1000);
    }
}

struct stream {
    struct peer *peer;
    size_t used;
    char bytes[sizeof(struct message)];
};

/* False when the connection has ended. */
static bool hear_stream(int fd, struct stream *stream)
{
    ssize_t got = recv(fd, stream->bytes + stream->used, sizeof stream->bytes - stream->used, 0);
    if (got <= 0)
        return got < 0 && errno == EINTR;
    stream->used += (size_t)got;
    if (stream->used < sizeof stream->bytes)
        return true;
    struct message message;
    memcpy(&message, stream->bytes, sizeof message);
    stream->used = 0;
    unsigned long long expected = stream->peer->tcp_heard + 1;
    if (memcmp(message.magic, "VKTK", 4) || message.sequence != expected)
        complain(&stream->peer->wrong, "talk: %llu instead of %llu", (unsigned long long)message.sequence, expected);
    stream->peer->tcp_heard = message.sequence;
    return true;
}

static void hear_datagram(int fd)
{
    struct message message;
    struct sockaddr_in from;
    socklen_t length = sizeof from;
    if (recvfrom(fd, &message, sizeof message, 0, (struct sockaddr *)&from, &length) != sizeof message)
        return;
    struct peer *peer = memcmp(message.magic, "VKTK", 4) ? NULL : peer_of(from.sin_addr.s_addr);
    if (peer && message.sequence > peer->udp_heard)
        peer->udp_heard = message.sequence;
}

static void *hear(void *unused)
{
    (void)unused;
    static struct stream streams[MAX_HEARD];
    struct pollfd fds[MAX_HEARD + 2];
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_port = htons(TALK_PORT)};
    int on = 1, count = 0;
    int udp = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0), tcp = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(tcp, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(udp, (struct sockaddr *)&here, sizeof here) < 0 || bind(tcp, (struct sockaddr *)&here, sizeof here) < 0 ||
        listen(tcp, 16) < 0)
        die("cannot listen for others");
    for (;;) {
        fds[count] = (struct pollfd){udp, POLLIN, 0};
        fds[count + 1] = (struct pollfd){tcp, count < MAX_HEARD ? POLLIN : 0, 0};
        if (poll(fds, (nfds_t)count + 2, -1) < 0)
            continue;
        bool spoken = fds[count].revents & POLLIN, asked = fds[count + 1].revents & POLLIN;
        for (int i = count - 1; i >= 0; i--) {
            if (!fds[i].revents || hear_stream(fds[i].fd, &streams[i]))
                continue;
            close(fds[i].fd);
            count--;
            fds[i] = fds[count];
            streams[i] = streams[count];
        }
        if (spoken)
            hear_datagram(udp);
        struct sockaddr_in from;
        socklen_t length = sizeof from;
        int fd = asked ? accept4(tcp, (struct sockaddr *)&from, &length, SOCK_CLOEXEC) : -1;
        struct peer *peer = fd < 0 ? NULL : peer_of(from.sin_addr.s_addr);
        if (peer) {
            fds[count] = (struct pollfd){fd, POLLIN, 0};
            streams[count++] = (struct stream){.peer = peer};
        } else if (fd >= 0) {
            close(fd);
        }
    }
    return NULL;
}

/* Begins to send to each of the addresses; only once. */
static int begin(char *list, char *reply, size_t room)
{
    char *words[MAX_WORDS];
    struct peer *peers[MAX_WORDS];
    int count = split_words(list, ",", words);
    for (int i = 0; i < count; i++) {
        uint32_t address;
        if (inet_pton(AF_INET, words[i], &address) != 1)
            return failed(reply, room, "talk: '%.32s' is no address", words[i]);
        peers[i] = peer_of(address);
        if (!peers[i])
            return failed(reply, room, "talk: at most %d others", MAX_PEERS);
    }
    if (begun)
        return failed(reply, room, "talk: it has begun already");
    begun = true;
    for (int i = 0; i < count; i++)
        start_thread(speak, peers[i]);
    return 0;
}

/* `talk [to=IP,IP,...] [rate=N]`: N messages a second to each, over UDP and over TCP; the counts, in all. */
int talk_command(char **words, int count, char *reply, size_t room)
{
    for (int i = 0; i < count; i++) {
        char *key, *value;
        uint64_t rate;
        int length = 0;
        if (!option(words[i], &key, &value))
            return failed(reply, room, "talk: cannot read '%s'", words[i]);
        if (!strcmp(key, "to"))
            length = begin(value, reply, room);
        else if (!strcmp(key, "rate") && parse_bytes(value, &rate) && rate <= 10000)
            rate_per_s = rate;
        else
            return failed(reply, room, "talk: cannot read '%s'", key);
        if (length)
            return length;
    }
    unsigned long long sums[5] = {0}, peers = 0;
    for (struct peer *peer = page.peers; peer < page.peers + MAX_PEERS && peer->address; peer++, peers++) {
        sums[0] += peer->udp_sent;
        sums[1] += peer->udp_heard;
        sums[2] += peer->tcp_sent;
        sums[3] += peer->tcp_heard;
        sums[4] += peer->wrong;
    }
    return snprintf(reply, room,
                    "ok peers=%llu rate=%llu udp_sent=%llu udp_heard=%llu tcp_sent=%llu tcp_heard=%llu wrong=%llu",
                    peers, (unsigned long long)rate_per_s, sums[0], sums[1], sums[2], sums[3], sums[4]);
}

void talk_start(uint32_t id)
{
    memcpy(page.magic, "VKTALK", 6);
    page.magic[6] = '0';
    page.magic[7] = '1';
    page.id = id;
    page.room = MAX_PEERS;
    start_thread(hear, NULL);
}
