/* What sockets and memcpy can do on this machine, with nothing above them: the yardstick of `bench transfer`.

       cc -O2 -o bare_tcp bare_tcp.c && ./bare_tcp POOL_MIB

   A sender with a pool of its own is forked; this process is the receiver. One line on stdin is one cell:

       read|memcpy BLOCK_BYTES BATCH CALLS cold|warm

   read: the request names BATCH blocks at random offsets of the sender's pool, the reply is their bytes back to back,
   and the receiver scatters them into random blocks of its own pool with recvmsg. memcpy: as many blocks from the
   sender's pool, which both have mapped, by memcpy. Offsets walk through a random order of all blocks of both pools, so
   that with pools larger than the caches everything is cold; warm repeats the same blocks. One line on stdout answers:

       {"seconds": [each call's], "cpu_s": of this process, "peer_cpu_s": of the sender}

   Not read: statuses, lengths, checksums, deadlines. Both pools are shared memory in small pages. */

#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { MAX_BATCH = 512 };

struct request {
    uint64_t block_bytes, batch, offsets[MAX_BATCH];
};

static uint64_t pool_bytes;
static char *remote_pool, *pool;

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static double clock_s(clockid_t id)
{
    struct timespec now;
    if (clock_gettime(id, &now)) fail("clock_gettime");
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* All of it, in as few calls as the kernel allows; `vector` is used up. */
static void move_all(int socket, struct iovec *vector, uint64_t count, int sends)
{
    struct msghdr message = {.msg_iov = vector, .msg_iovlen = count};
    while (message.msg_iovlen) {
        ssize_t moved = sends ? sendmsg(socket, &message, MSG_NOSIGNAL) : recvmsg(socket, &message, MSG_WAITALL);
        if (moved < 0 && errno == EINTR) continue;
        if (moved <= 0) fail(sends ? "sendmsg" : "recvmsg");
        while (message.msg_iovlen && (size_t)moved >= message.msg_iov->iov_len) {
            moved -= (ssize_t)message.msg_iov->iov_len;
            message.msg_iov++;
            message.msg_iovlen--;
        }
        if (message.msg_iovlen) {
            message.msg_iov->iov_base = (char *)message.msg_iov->iov_base + moved;
            message.msg_iov->iov_len -= (size_t)moved;
        }
    }
}

static void move_some(int socket, void *bytes, size_t size, int sends)
{
    struct iovec one = {bytes, size};
    move_all(socket, &one, 1, sends);
}

static void serve(int socket)
{
    static struct request asked;
    struct iovec vector[MAX_BATCH];
    for (;;) {
        if (recv(socket, &asked, 16, MSG_WAITALL) != 16) exit(0);
        move_some(socket, asked.offsets, asked.batch * 8, 0);
        for (uint64_t i = 0; i < asked.batch; i++)
            vector[i] = (struct iovec){remote_pool + asked.offsets[i], asked.block_bytes};
        move_all(socket, vector, asked.batch, 1);
    }
}

static uint64_t random_state = 0x9E3779B97F4A7C15ull;

static uint64_t next_random(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

/* A random order of the block offsets of a pool. */
static void shuffle(uint64_t *offsets, uint64_t blocks, uint64_t block_bytes)
{
    for (uint64_t i = 0; i < blocks; i++) offsets[i] = i * block_bytes;
    for (uint64_t i = blocks - 1; i; i--) {
        uint64_t other = next_random() % (i + 1), kept = offsets[i];
        offsets[i] = offsets[other];
        offsets[other] = kept;
    }
}

static void one_call(int socket, struct request *asked, const uint64_t *places)
{
    struct iovec vector[MAX_BATCH];
    if (socket < 0) {
        for (uint64_t i = 0; i < asked->batch; i++)
            memcpy(pool + places[i], remote_pool + asked->offsets[i], asked->block_bytes);
        return;
    }
    move_some(socket, asked, 16 + asked->batch * 8, 1);
    for (uint64_t i = 0; i < asked->batch; i++) vector[i] = (struct iovec){pool + places[i], asked->block_bytes};
    move_all(socket, vector, asked->batch, 0);
}

/* One cell; `socket` is -1 for memcpy. */
static void cell(int socket, clockid_t peer, uint64_t block_bytes, uint64_t batch, uint64_t calls, int cold)
{
    uint64_t blocks = pool_bytes / block_bytes, next = 0;
    uint64_t *from = malloc(blocks * 8), *to = malloc(blocks * 8), places[MAX_BATCH];
    double *seconds = malloc(calls * sizeof(double));
    struct request asked = {block_bytes, batch, {0}};
    if (!from || !to || !seconds) fail("malloc");
    shuffle(from, blocks, block_bytes);
    shuffle(to, blocks, block_bytes);
    double cpu_s = clock_s(CLOCK_PROCESS_CPUTIME_ID), peer_cpu_s = clock_s(peer);
    for (uint64_t call = 0; call < calls; call++) {
        for (uint64_t i = 0; i < batch; i++, next = cold || i + 1 < batch ? (next + 1) % blocks : 0) {
            asked.offsets[i] = from[next];
            places[i] = to[next];
        }
        double before_s = clock_s(CLOCK_MONOTONIC);
        one_call(socket, &asked, places);
        seconds[call] = clock_s(CLOCK_MONOTONIC) - before_s;
    }
    cpu_s = clock_s(CLOCK_PROCESS_CPUTIME_ID) - cpu_s;
    peer_cpu_s = clock_s(peer) - peer_cpu_s;
    for (uint64_t i = 0; i < batch; i++)
        if (memcmp(pool + places[i], remote_pool + asked.offsets[i], block_bytes)) {
            fputs("bare_tcp: a block has other bytes than its source\n", stderr);
            exit(1);
        }
    printf("{\"seconds\": [");
    for (uint64_t call = 0; call < calls; call++) printf("%s%.9f", call ? ", " : "", seconds[call]);
    printf("], \"cpu_s\": %.6f, \"peer_cpu_s\": %.6f}\n", cpu_s, peer_cpu_s);
    fflush(stdout);
    free(from);
    free(to);
    free(seconds);
}

int main(int count, char **words)
{
    char line[256], verb[16], kind[16];
    uint64_t block_bytes, batch, calls;
    int one = 1;
    if (count != 2 || !(pool_bytes = strtoull(words[1], NULL, 10) << 20)) {
        fputs("usage: bare_tcp POOL_MIB\n", stderr);
        return 2;
    }
    remote_pool = mmap(NULL, pool_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pool = mmap(NULL, pool_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (remote_pool == MAP_FAILED || pool == MAP_FAILED) fail("mmap");
    for (uint64_t i = 0; i < pool_bytes / 8; i++) ((uint64_t *)remote_pool)[i] = next_random();
    memset(pool, 1, pool_bytes);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), client = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    if (bind(listener, (struct sockaddr *)&address, size) || listen(listener, 1)
        || getsockname(listener, (struct sockaddr *)&address, &size)
        || connect(client, (struct sockaddr *)&address, size))
        fail("sockets on loopback");
    int served = accept(listener, NULL, NULL);
    if (served < 0) fail("accept");
    setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(served, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    pid_t sender = fork();
    if (sender < 0) fail("fork");
    if (!sender) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(client);
        serve(served);
    }
    close(served);
    clockid_t peer;
    if (clock_getcpuclockid(sender, &peer)) fail("clock_getcpuclockid");
    puts("{}");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        int words_read = sscanf(line, "%15s %lu %lu %lu %15s", verb, &block_bytes, &batch, &calls, kind);
        if (words_read != 5 || !batch || batch > MAX_BATCH || !calls || batch * block_bytes > pool_bytes) {
            fprintf(stderr, "bare_tcp: cannot do %s", line);
            return 2;
        }
        cell(strcmp(verb, "read") ? -1 : client, peer, block_bytes, batch, calls, !strcmp(kind, "cold"));
    }
    return 0;
}
