/* The machine's own ceilings, with no transfer engine in the way.
 *
 * Build: gcc -O2 -pthread -o raw raw.c
 * Use:   raw WHAT SECONDS SIZE...     prints one line a size: SIZE VALUE
 *
 * WHAT         value   between
 * tcp_stream   GB/s    two processes, loopback, one blocking stream, SIZE bytes a call
 * tcp_ping     us      two processes, loopback, a round trip of SIZE bytes, both sides spinning (median)
 * vm_read      GB/s    two processes, process_vm_readv of SIZE bytes
 * vm_write     GB/s    two processes, process_vm_writev of SIZE bytes
 * memcpy       GB/s    one thread
 * shm_ping     us      two processes spinning on shared memory, one way (half of the median round trip)
 * queue_hop    us      two threads, a single-producer ring each way, one way (half of the median round trip)
 *
 * Buffers are touched before and reused throughout. GB/s is 1e9 bytes over all the time.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define LINE 64
#define MAX_SAMPLES (1 << 20)

static double seconds;

static void die(const char *what) {
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static char *buffer(size_t size, int flags) {
    char *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_ANONYMOUS | flags, -1, 0);
    if (p == MAP_FAILED)
        die("mmap");
    memset(p, 1, size);
    return p;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The median of single calls, in microseconds; the first tenth of the time warms up. */
static double median_us(void (*call)(void *), void *context) {
    double *took = malloc(MAX_SAMPLES * sizeof *took), start = now(), last, value;
    size_t n = 0;
    if (!took)
        die("malloc");
    while (now() - start < seconds / 10)
        call(context);
    start = last = now();
    while (n < MAX_SAMPLES && (last - start < seconds || n < 3)) {
        double after;
        call(context);
        after = now();
        took[n++] = after - last;
        last = after;
    }
    qsort(took, n, sizeof *took, by_value);
    value = took[n / 2] * 1e6;
    free(took);
    return value;
}

/* GB/s of repeated calls that each move `size` bytes. */
static double gb_per_s(void (*call)(void *), void *context, size_t size) {
    double start, end;
    size_t n = 0;
    call(context);
    start = now();
    do {
        call(context);
        n++;
        end = now();
    } while (end - start < seconds || n < 3);
    return (double)n * (double)size / (end - start) / 1e9;
}

static pid_t child(void (*body)(void *), void *context) {
    pid_t pid = fork();
    if (pid < 0)
        die("fork");
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        body(context);
        _exit(0);
    }
    return pid;
}

static void reap(pid_t pid) {
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
}

/* --- TCP --- */

struct tcp {
    int fd;
    size_t size;
    char *data;
};

static void tcp_pair(int fds[2]) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;
    int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
    if (listener < 0 || bind(listener, (struct sockaddr *)&at, len) || listen(listener, 1) ||
        getsockname(listener, (struct sockaddr *)&at, &len))
        die("listen");
    fds[0] = socket(AF_INET, SOCK_STREAM, 0);
    if (fds[0] < 0 || connect(fds[0], (struct sockaddr *)&at, len))
        die("connect");
    fds[1] = accept(listener, NULL, NULL);
    if (fds[1] < 0)
        die("accept");
    close(listener);
    for (int i = 0; i < 2; i++)
        setsockopt(fds[i], IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

static void send_for_ever(void *context) {
    struct tcp *tcp = context;
    for (;;)
        if (send(tcp->fd, tcp->data, tcp->size, MSG_NOSIGNAL) < 0)
            return;
}

static double tcp_stream(size_t size) {
    int fds[2];
    double start, end, warm;
    size_t bytes = 0;
    struct tcp sender = {.size = size, .data = buffer(size, MAP_PRIVATE)};
    char *into = buffer(size, MAP_PRIVATE);
    pid_t pid;
    tcp_pair(fds);
    sender.fd = fds[0];
    pid = child(send_for_ever, &sender);
    close(fds[0]);
    /* The congestion window needs a moment to open. */
    for (warm = now(); now() - warm < 0.1;)
        if (recv(fds[1], into, size, 0) <= 0)
            die("recv");
    start = now();
    do {
        ssize_t n = recv(fds[1], into, size, 0);
        if (n <= 0)
            die("recv");
        bytes += (size_t)n;
        end = now();
    } while (end - start < seconds);
    reap(pid);
    close(fds[1]);
    munmap(into, size);
    munmap(sender.data, size);
    return (double)bytes / (end - start) / 1e9;
}

static void move_all(struct tcp *tcp, int sending) {
    size_t done = 0;
    while (done < tcp->size) {
        ssize_t n = sending ? send(tcp->fd, tcp->data + done, tcp->size - done, MSG_DONTWAIT | MSG_NOSIGNAL)
                            : recv(tcp->fd, tcp->data + done, tcp->size - done, MSG_DONTWAIT);
        if (n > 0)
            done += (size_t)n;
        else if (n == 0 || (errno != EAGAIN && errno != EINTR))
            die("ping");
    }
}

static void echo(void *context) {
    for (;;) {
        move_all(context, 0);
        move_all(context, 1);
    }
}

static void ping(void *context) {
    move_all(context, 1);
    move_all(context, 0);
}

static double tcp_ping(size_t size) {
    int fds[2];
    struct tcp mine = {.size = size, .data = buffer(size, MAP_PRIVATE)}, theirs = mine;
    double value;
    pid_t pid;
    tcp_pair(fds);
    mine.fd = fds[0];
    theirs.fd = fds[1];
    pid = child(echo, &theirs);
    close(fds[1]);
    value = median_us(ping, &mine);
    reap(pid);
    close(fds[0]);
    munmap(mine.data, size);
    return value;
}

/* --- memory --- */

struct copy {
    char *to, *from;
    size_t size;
    pid_t pid;
    /* Shared: the child has made its pages. */
    atomic_int *ready;
};

static void copy_here(void *context) {
    struct copy *c = context;
    memcpy(c->to, c->from, c->size);
    /* Keeps the compiler from dropping copies nobody reads. */
    __asm__ volatile("" : : "r"(c->to) : "memory");
}

static void vm_move(struct copy *c, int reading) {
    size_t done = 0;
    while (done < c->size) {
        struct iovec local = {c->to + done, c->size - done}, remote = {c->from + done, c->size - done};
        ssize_t n = reading ? process_vm_readv(c->pid, &local, 1, &remote, 1, 0)
                            : process_vm_writev(c->pid, &local, 1, &remote, 1, 0);
        if (n <= 0)
            die("process_vm");
        done += (size_t)n;
    }
}

static void vm_read(void *context) { vm_move(context, 1); }
static void vm_write(void *context) { vm_move(context, 0); }

static void touch_and_wait(void *context) {
    struct copy *c = context;
    /* Private pages are shared with the parent until written: make them the child's own. */
    memset(c->from, 2, c->size);
    atomic_store(c->ready, 1);
    for (;;)
        pause();
}

static double memory(size_t size, void (*call)(void *), int two_processes) {
    struct copy c = {.to = buffer(size, MAP_PRIVATE), .from = buffer(size, MAP_PRIVATE), .size = size};
    double value;
    if (two_processes) {
        c.ready = (atomic_int *)buffer(sizeof *c.ready, MAP_SHARED);
        atomic_store(c.ready, 0);
        c.pid = child(touch_and_wait, &c);
        while (!atomic_load(c.ready))
            usleep(1000);
    }
    value = gb_per_s(call, &c, size);
    if (two_processes)
        reap(c.pid);
    munmap(c.to, size);
    munmap(c.from, size);
    return value;
}

/* --- hops --- */

#define SLOTS 64

/* A ring with one producer and one consumer; a slot is free or full by its own flag. */
struct ring {
    struct {
        _Alignas(LINE) atomic_uint full;
        char payload[LINE];
    } slots[SLOTS];
};

struct hop {
    struct ring *out, *in;
    unsigned sent, taken;
    size_t size;
    char data[LINE];
    atomic_int stop;
};

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void push(struct hop *h) {
    unsigned at = h->sent++ % SLOTS;
    while (atomic_load_explicit(&h->out->slots[at].full, memory_order_acquire))
        relax();
    memcpy(h->out->slots[at].payload, h->data, h->size);
    atomic_store_explicit(&h->out->slots[at].full, 1, memory_order_release);
}

static void take(struct hop *h) {
    unsigned at = h->taken++ % SLOTS;
    while (!atomic_load_explicit(&h->in->slots[at].full, memory_order_acquire))
        relax();
    memcpy(h->data, h->in->slots[at].payload, h->size);
    atomic_store_explicit(&h->in->slots[at].full, 0, memory_order_release);
}

static void there_and_back(void *context) {
    push(context);
    take(context);
}

static void hop_echo(void *context) {
    struct hop *h = context;
    for (;;) {
        take(h);
        if (atomic_load(&h->stop))
            return;
        push(h);
    }
}

static void *hop_echo_thread(void *context) {
    hop_echo(context);
    return NULL;
}

static double hop(size_t size, int threads) {
    struct ring *rings = (struct ring *)buffer(2 * sizeof(struct ring), MAP_SHARED);
    struct hop mine = {.out = &rings[0], .in = &rings[1], .size = size < LINE ? size : LINE};
    struct hop theirs = {.out = &rings[1], .in = &rings[0], .size = mine.size};
    double value;
    memset(rings, 0, 2 * sizeof *rings);
    if (threads) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, hop_echo_thread, &theirs))
            die("pthread_create");
        value = median_us(there_and_back, &mine) / 2;
        atomic_store(&theirs.stop, 1);
        push(&mine);
        pthread_join(thread, NULL);
    } else {
        pid_t pid = child(hop_echo, &theirs);
        value = median_us(there_and_back, &mine) / 2;
        reap(pid);
    }
    munmap(rings, 2 * sizeof *rings);
    return value;
}

static double measure(const char *what, size_t size) {
    if (!strcmp(what, "tcp_stream"))
        return tcp_stream(size);
    if (!strcmp(what, "tcp_ping"))
        return tcp_ping(size);
    if (!strcmp(what, "vm_read"))
        return memory(size, vm_read, 1);
    if (!strcmp(what, "vm_write"))
        return memory(size, vm_write, 1);
    if (!strcmp(what, "memcpy"))
        return memory(size, copy_here, 0);
    if (!strcmp(what, "shm_ping"))
        return hop(size, 0);
    if (!strcmp(what, "queue_hop"))
        return hop(size, 1);
    errno = EINVAL;
    die(what);
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 4 || (seconds = atof(argv[2])) <= 0) {
        fprintf(stderr, "use: raw WHAT SECONDS SIZE...\n");
        return 2;
    }
    for (int i = 3; i < argc; i++) {
        size_t size = strtoull(argv[i], NULL, 10);
        if (size == 0) {
            errno = EINVAL;
            die(argv[i]);
        }
        printf("%zu %.6f\n", size, measure(argv[1], size));
        fflush(stdout);
    }
    return 0;
}
