/* CUDA's driver on a machine that has none, for tests: four GPUs whose memory is the host's.
 *
 * Work on a stream happens in order, on a thread of the driver's. What is true of the real driver and matters to who
 * calls it was measured on H100 and H200 (driver 580.159, CUDA 13), and holds here too:
 *
 * - While a stream waits for the host (cuStreamWaitValue32), cuMemFree, cuMemFreeHost, cuMemHostUnregister,
 *   cuIpcCloseMemHandle and cuModuleLoadDataEx do not return; while one of them waits, allocations, copies and launches
 *   of other threads on that GPU do not return either. Host memory is of all GPUs.
 * - cuModuleUnload and cuCtxSynchronize do not return either, and hold up nobody else.
 * - Everything else returns: queries, streams and events, opening handles, functions of modules that are loaded.
 *
 * With fake_connections(n) all streams of a GPU share n hardware queues, as under CUDA_DEVICE_MAX_CONNECTIONS=n: what is
 * behind a wait in its queue does not run before the wait is over, of whichever stream it is. (Seen on an H200 with n = 1.)
 *
 * What tests control: fake_pause(1) has copies and kernels (no fills) stay where they are until fake_pause(0), but for as many as
 * fake_pass() lets by; fake_refuse() has copies refused after so many more; fake_stall(1) has calls that enqueue copies
 * not return until fake_stall(0), and fake_stalled() counts them; fake_launched() counts the bytes that streams were told
 * to copy, fake_tables() the copy kernels with tables in GPU memory, fake_kernels() all copy kernels, fake_allocations() the
 * memory that was ever asked for, fake_blocked() the calls that wait. Kernels are known by
 * their names; fake_emulate() adds one, which a function runs on a thread of its own. fake_record(1) notes the launches of
 * such kernels until fake_record(0), as a graph does, and fake_replay() launches them again with the same parameters.
 * fake_fabric(n) puts the process into NVLink domain n, where memory has fabric handles, but not that of the last GPU.
 * Before that the process is like one without a channel of the IMEX service.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef int code;
typedef uint64_t address;
typedef void *handle;

enum { GPUS = 4, INVALID = 1, NO_MEMORY = 2, NOT_INITIALISED = 3, NOT_READY = 600, ALREADY = 704, NOT_PERMITTED = 800 };
enum { DEVICE_MEMORY = 2, HOST_MEMORY = 1 };

struct piece {
    address to, from;
    uint64_t len;
};

enum kind { COPY, FILL, KERNEL, EMULATED, WAIT_VALUE, WAIT_EVENT };

struct emulated {
    const char *name;
    size_t len;
    void (*kernel)(const void *);
    void (*emulate)(void (*)(const void *), unsigned, unsigned, const void *);
};

struct stream;

struct work {
    struct work *next;
    enum kind kind;
    struct piece one, *pieces;
    size_t count;
    uint64_t *flag, ticket, *changes, amount;
    uint32_t adds, warps;
    /* Of pieces and cursors. Tables in GPU memory are read when the kernel runs, as earlier work may write them. */
    address places[2];
    int in_gpu;
    volatile uint32_t *word;
    uint32_t value;
    volatile uint64_t *wide_word;
    uint64_t wide_value;
    struct stream *other;
    uint64_t until;
    const struct emulated *emulated;
    unsigned blocks, threads;
    void *parameter;
    int has_begun, is_over;
    uint64_t order;
};

struct stream {
    struct stream *next;
    int gpu, number;
    struct work *first, *last;
    uint64_t enqueued, done;
};

struct event {
    struct stream *stream;
    uint64_t until;
};

struct memory {
    struct memory *next;
    address base;
    size_t len;
    int type, gpu, fd, is_mapped;
    uint64_t id;
};

struct function {
    const char *name;
    int pieces, cursors;
};

static const struct function functions[] = {
    {"uccl_copy_table", 0, 0}, {"uccl_copy_small", 100, 101}, {"uccl_copy_wide", 256, 1057}};

static struct emulated emulations[64];
static int emulated_count;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
/* Held by calls that wait for a GPU and hold up others; taken for a moment by those. */
static pthread_mutex_t contexts[GPUS] = {[0 ... GPUS - 1] = PTHREAD_MUTEX_INITIALIZER};
static struct stream *streams, defaults[GPUS];
static struct memory *memories;
static uint64_t next_id = 1, launched, table_launches;
static uint64_t kernel_launches, allocations;
static uint64_t next_order = 1;
static int connections, next_number = 1, shuts, flushes, domain;
static int initialised, paused, passing, taken = -1, stall, stalled, blocked;
static uint64_t passing_most;
static _Thread_local int stack[16], depth;

static int current(void) { return depth ? stack[depth - 1] : 0; }

static void pass(int gpu) {
    pthread_mutex_lock(&contexts[gpu]);
    pthread_mutex_unlock(&contexts[gpu]);
}

/* The lock is held from here on. */

static void *emulate(void *work) {
    struct work *w = work;
    w->emulated->emulate(w->emulated->kernel, w->blocks, w->threads, w->parameter);
    __atomic_store_n(&w->is_over, 1, __ATOMIC_RELEASE);
    return NULL;
}

static int has_run(struct work *w) {
    pthread_t thread;
    if (!w->has_begun) {
        w->has_begun = pthread_create(&thread, NULL, emulate, w) == 0;
        if (w->has_begun)
            pthread_detach(thread);
    }
    return __atomic_load_n(&w->is_over, __ATOMIC_ACQUIRE);
}

/* Whether a wait that is not over stands ahead of this work in the queue that its stream shares with others. */
static int is_behind_wait(struct stream *s, struct work *w);

static int is_ready(struct work *w) {
    switch (w->kind) {
    case EMULATED:
        return has_run(w);
    case WAIT_VALUE:
        if (w->wide_word)
            return (int64_t)(*w->wide_word - w->wide_value) >= 0;
        return (int32_t)(*w->word - w->value) >= 0;
    case WAIT_EVENT:
        return w->other->done >= w->until;
    case FILL:
        return 1;
    default:
        if (paused && passing > 0 && w->one.len <= passing_most)
            return passing--, 1;
        return !paused;
    }
}

static void read_tables(struct work *w, const address *places);

static uint64_t bytes_of(const struct work *w) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < w->count; i++)
        bytes += w->pieces[i].len;
    return bytes;
}

static void run(struct work *w) {
    switch (w->kind) {
    case COPY:
        memmove((void *)w->one.to, (void *)w->one.from, w->one.len);
        break;
    case FILL:
        memset((void *)w->one.to, (int)w->one.from, w->one.len);
        break;
    case KERNEL:
        if (w->in_gpu) {
            read_tables(w, w->places);
            __atomic_fetch_add(&launched, bytes_of(w), __ATOMIC_RELAXED);
        }
        for (size_t i = 0; i < w->count; i++)
            memmove((void *)w->pieces[i].to, (void *)w->pieces[i].from, w->pieces[i].len);
        if (w->changes && w->adds)
            __atomic_fetch_add(w->changes, w->amount, __ATOMIC_RELEASE);
        else if (w->changes)
            __atomic_store_n(w->changes, w->amount, __ATOMIC_RELEASE);
        if (w->flag)
            __atomic_store_n(w->flag, w->ticket, __ATOMIC_RELEASE);
        break;
    default:
        break;
    }
    free(w->pieces);
    free(w->parameter);
    free(w);
}

static int is_behind_wait(struct stream *s, struct work *w) {
    if (!connections)
        return 0;
    for (struct stream *other = streams; other; other = other->next) {
        if (other == s || other->gpu != s->gpu || other->number % connections != s->number % connections)
            continue;
        for (struct work *ahead = other->first; ahead && ahead->order < w->order; ahead = ahead->next)
            if (ahead->kind == WAIT_VALUE || ahead->kind == WAIT_EVENT)
                return 1;
    }
    return 0;
}

static void advance(struct stream *s) {
    while (s->first && !is_behind_wait(s, s->first) && is_ready(s->first)) {
        struct work *w = s->first;
        s->first = w->next;
        run(w);
        s->done++;
        pthread_cond_broadcast(&changed);
    }
}

static void *work_off(void *unused) {
    (void)unused;
    for (;;) {
        pthread_mutex_lock(&lock);
        for (struct stream *s = streams; s; s = s->next)
            advance(s);
        pthread_mutex_unlock(&lock);
        usleep(20);
    }
    return NULL;
}

static struct memory *memory_at(address a);

static int waits_for_host(int gpu) {
    for (struct stream *s = streams; s; s = s->next)
        if ((gpu < 0 || s->gpu == gpu) && s->first && s->first->kind == WAIT_VALUE && !is_ready(s->first))
            return 1;
    return 0;
}

static void wait_for(int gpu) {
    blocked++;
    while (waits_for_host(gpu))
        pthread_cond_wait(&changed, &lock);
    blocked--;
}

static int overlaps(struct piece p, address base, size_t len) {
    return (p.to < base + len && base < p.to + p.len) || (p.from < base + len && base < p.from + p.len);
}

/* Whether work that is enqueued copies to or from the memory at this base: who frees it waits. */
static int is_used(address base) {
    struct memory *m = memory_at(base);
    for (struct stream *s = m ? streams : NULL; s; s = s->next)
        for (struct work *w = s->first; w; w = w->next) {
            if (w->kind == COPY && overlaps(w->one, m->base, m->len))
                return 1;
            for (size_t i = 0; w->kind == KERNEL && i < w->count; i++)
                if (overlaps(w->pieces[i], m->base, m->len))
                    return 1;
        }
    return 0;
}

static struct memory *memory_at(address a) {
    for (struct memory *m = memories; m; m = m->next)
        if (a >= m->base && a < m->base + m->len)
            return m;
    return NULL;
}

static code forget(address a, int unmap) {
    for (struct memory **m = &memories; *m; m = &(*m)->next)
        if ((*m)->base == a) {
            struct memory *gone = *m;
            *m = gone->next;
            if (unmap)
                munmap((void *)gone->base, gone->len);
            if (gone->fd >= 0)
                close(gone->fd);
            free(gone);
            return 0;
        }
    return INVALID;
}

/* And up to here. */

static void note(address base, size_t len, int type, int fd) {
    struct memory *m = malloc(sizeof *m);
    pthread_mutex_lock(&lock);
    *m = (struct memory){memories, base, len, type, current(), fd, 0, next_id++};
    memories = m;
    pthread_mutex_unlock(&lock);
}

/* A call that waits for streams that wait for the host, and holds up others meanwhile. */
static code give_back(int gpu, address a, int unmap) {
    for (int i = 0; i < GPUS; i++)
        if (gpu < 0 || i == gpu)
            pthread_mutex_lock(&contexts[i]);
    pthread_mutex_lock(&lock);
    wait_for(gpu);
    while (a && unmap && is_used(a))
        pthread_cond_wait(&changed, &lock);
    code result = a ? forget(a, unmap) : 0;
    pthread_mutex_unlock(&lock);
    for (int i = 0; i < GPUS; i++)
        if (gpu < 0 || i == gpu)
            pthread_mutex_unlock(&contexts[i]);
    return result;
}

static struct stream *stream_of(handle h) { return h ? h : &defaults[current()]; }

static code enqueue(handle h, struct work w) {
    struct stream *s = stream_of(h);
    pass(s->gpu);
    struct work *kept = malloc(sizeof *kept);
    *kept = w;
    pthread_mutex_lock(&lock);
    stalled++;
    while (w.kind == COPY && stall)
        pthread_cond_wait(&changed, &lock);
    stalled--;
    if (w.kind == COPY && taken == 0) {
        pthread_mutex_unlock(&lock);
        return free(kept), INVALID;
    }
    if (w.kind == COPY && taken > 0)
        taken--;
    if (w.kind == COPY)
        launched += w.one.len;
    if (w.kind == KERNEL)
        launched += bytes_of(&w);
    kept->order = next_order++;
    if (s->first)
        s->last->next = kept;
    else
        s->first = kept;
    s->last = kept;
    s->enqueued++;
    pthread_mutex_unlock(&lock);
    return 0;
}

/* For tests. */

int fake_flushes(void) { return __atomic_load_n(&flushes, __ATOMIC_SEQ_CST); }

void fake_shut(int yes) {
    pthread_mutex_lock(&lock);
    shuts = yes;
    pthread_mutex_unlock(&lock);
}

void fake_connections(int count) {
    pthread_mutex_lock(&lock);
    connections = count;
    pthread_mutex_unlock(&lock);
}

void fake_pause(int yes) {
    pthread_mutex_lock(&lock);
    paused = yes;
    passing = 0;
    pthread_mutex_unlock(&lock);
}

/* Lets so many kernels and copies of at most so many bytes by while all are paused. */
void fake_pass(int count, uint64_t most) {
    pthread_mutex_lock(&lock);
    passing += count;
    passing_most = most;
    pthread_mutex_unlock(&lock);
}

/* The copy kernels that were launched. */
uint64_t fake_kernels(void) {
    pthread_mutex_lock(&lock);
    uint64_t count = kernel_launches;
    pthread_mutex_unlock(&lock);
    return count;
}

/* How often memory was asked for. */
uint64_t fake_allocations(void) {
    pthread_mutex_lock(&lock);
    uint64_t count = allocations;
    pthread_mutex_unlock(&lock);
    return count;
}

/* Takes so many copies more and refuses those after them; with a number below 0, none. */
void fake_refuse(int after) {
    pthread_mutex_lock(&lock);
    taken = after;
    pthread_mutex_unlock(&lock);
}

void fake_stall(int yes) {
    pthread_mutex_lock(&lock);
    stall = yes;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

int fake_stalled(void) {
    pthread_mutex_lock(&lock);
    int calls = stalled;
    pthread_mutex_unlock(&lock);
    return calls;
}

uint64_t fake_tables(void) {
    pthread_mutex_lock(&lock);
    uint64_t count = table_launches;
    pthread_mutex_unlock(&lock);
    return count;
}

uint64_t fake_launched(void) {
    pthread_mutex_lock(&lock);
    uint64_t bytes = launched;
    pthread_mutex_unlock(&lock);
    return bytes;
}

void fake_fabric(int to) { domain = to; }

int fake_blocked(void) {
    pthread_mutex_lock(&lock);
    int calls = blocked;
    pthread_mutex_unlock(&lock);
    return calls;
}

/* A kernel of this name takes a parameter of so many bytes. */
void fake_emulate(struct emulated one) {
    pthread_mutex_lock(&lock);
    if (emulated_count < (int)(sizeof emulations / sizeof *emulations))
        emulations[emulated_count++] = one;
    pthread_mutex_unlock(&lock);
}

/* The driver's. */

code cuInit(unsigned flags) {
    (void)flags;
    pthread_mutex_lock(&lock);
    int first = !initialised;
    initialised = 1;
    for (int i = 0; first && i < GPUS; i++) {
        defaults[i].gpu = i;
        defaults[i].next = streams;
        streams = &defaults[i];
    }
    pthread_mutex_unlock(&lock);
    pthread_t thread;
    if (first && pthread_create(&thread, NULL, work_off, NULL) == 0)
        pthread_detach(thread);
    return 0;
}

code cuDriverGetVersion(int *version) { return *version = 13000, 0; }
code cuGetErrorName(code c, const char **name) { return (void)c, *name = "FAKE_ERROR", 0; }
code cuGetErrorString(code c, const char **text) { return (void)c, *text = "the fake driver refused", 0; }
code cuDeviceGetCount(int *count) { return *count = GPUS, 0; }
code cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
code cuDeviceGetName(char *name, int len, int device) { return snprintf(name, len, "fake %d", device), 0; }
code cuDeviceTotalMem_v2(size_t *bytes, int device) { return (void)device, *bytes = 1ul << 34, 0; }

code cuDeviceGetAttribute(int *value, int which, int device) {
    static const int known[][2] = {{16, 8}, {40, 3}, {75, 9}, {76, 0}, {98, 1}, {103, 0}, {117, 1}};
    /* The last GPU alone sees writes of other devices in order. */
    *value = which == 33 ? device + 1 : which == 118 && device == GPUS - 1 ? 100 : 0;
    if (which == 128)
        *value = device != GPUS - 1;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i][0] == which)
            *value = known[i][1];
    return 0;
}

code cuDeviceGetUuid(char *uuid, int device) { return memset(uuid, 'f', 16), uuid[15] = (char)device, 0; }
code cuDeviceCanAccessPeer(int *can, int a, int b) { return (void)a, (void)b, *can = 1, 0; }
/* Of the two only atomic operations are asked about. */
code cuDeviceGetP2PAttribute(int *value, int which, int a, int b) {
    return (void)which, (void)a, (void)b, *value = 1, 0;
}
code cuDevicePrimaryCtxRetain(handle *context, int device) { return *context = (handle)(intptr_t)(device + 1), 0; }
code cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    return (void)device, *flags = 0, *active = 1, 0;
}

code cuCtxGetCurrent(handle *context) {
    *context = depth ? (handle)(intptr_t)(current() + 1) : NULL;
    return initialised ? 0 : NOT_INITIALISED;
}

code cuCtxPushCurrent_v2(handle context) { return stack[depth++] = (int)(intptr_t)context - 1, 0; }
code cuCtxPopCurrent_v2(handle *context) { return *context = (handle)(intptr_t)(stack[--depth] + 1), 0; }
code cuThreadExchangeStreamCaptureMode(int *mode) { return *mode = 0, 0; }
code cuCtxEnablePeerAccess(handle peer, unsigned flags) { return (void)peer, (void)flags, 0; }
code cuCtxGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, 0; }

static int works(int gpu) {
    for (struct stream *s = streams; s; s = s->next)
        if (s->gpu == gpu && s->first)
            return 1;
    return 0;
}

code cuCtxSynchronize(void) {
    pthread_mutex_lock(&lock);
    wait_for(current());
    while (works(current()))
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    return 0;
}

code cuPointerGetAttributes(unsigned count, const int *which, void **values, address a) {
    pthread_mutex_lock(&lock);
    struct memory *m = memory_at(a);
    for (unsigned i = 0; i < count && m; i++)
        switch (which[i]) {
        case 2:
            *(uint32_t *)values[i] = m->type;
            break;
        case 7:
            *(uint64_t *)values[i] = m->id;
            break;
        case 9:
            *(int *)values[i] = m->gpu;
            break;
        case 10:
            *(uint8_t *)values[i] = m->type == DEVICE_MEMORY && !m->is_mapped;
            break;
        case 11:
            *(uint64_t *)values[i] = m->base;
            break;
        case 12:
            *(uint64_t *)values[i] = m->len;
            break;
        case 13:
            *(uint8_t *)values[i] = 1;
            break;
        }
    pthread_mutex_unlock(&lock);
    return 0;
}

code cuMemGetAddressRange_v2(address *base, size_t *len, address a) {
    pthread_mutex_lock(&lock);
    struct memory *m = memory_at(a);
    if (m)
        *base = m->base, *len = m->len;
    pthread_mutex_unlock(&lock);
    return m ? 0 : INVALID;
}

static code allocate(void **start, size_t len, int type) {
    int fd = memfd_create("fake", MFD_CLOEXEC);
    if (len == 0 || fd < 0 || ftruncate(fd, len) != 0)
        return INVALID;
    pass(current());
    pthread_mutex_lock(&lock);
    allocations++;
    pthread_mutex_unlock(&lock);
    *start = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (*start == MAP_FAILED)
        return close(fd), NO_MEMORY;
    note((address)*start, len, type, fd);
    return 0;
}

code cuMemAlloc_v2(address *start, size_t len) { return allocate((void **)start, len, DEVICE_MEMORY); }
code cuMemAllocManaged(address *start, size_t len, unsigned flags) {
    return (void)start, (void)len, (void)flags, INVALID;
}
code cuMemHostAlloc(void **start, size_t len, unsigned flags) { return (void)flags, allocate(start, len, HOST_MEMORY); }
code cuMemFree_v2(address start) { return give_back(current(), start, 1); }
code cuMemFreeHost(void *start) { return give_back(-1, (address)start, 1); }
code cuMemHostRegister_v2(void *start, size_t len, unsigned flags) {
    return (void)flags, note((address)start, len, HOST_MEMORY, -1), 0;
}
code cuMemHostUnregister(void *start) { return give_back(-1, (address)start, 0); }
code cuMemGetInfo_v2(size_t *free, size_t *total) { return *free = *total = 1ul << 34, 0; }

/* The numbers of the owner and of its descriptor. */
struct ipc_handle {
    int pid, fd;
    size_t len;
    char rest[48];
};

code cuIpcGetMemHandle(struct ipc_handle *h, address a) {
    pthread_mutex_lock(&lock);
    struct memory *m = shuts ? NULL : memory_at(a);
    if (m)
        *h = (struct ipc_handle){getpid(), m->fd, m->len, {0}};
    pthread_mutex_unlock(&lock);
    return m ? 0 : INVALID;
}

code cuIpcOpenMemHandle_v2(address *start, struct ipc_handle h, unsigned flags) {
    (void)flags;
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", h.pid, h.fd);
    int fd = h.pid == getpid() ? -1 : open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return INVALID;
    void *mapped = mmap(NULL, h.len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED)
        return close(fd), INVALID;
    *start = (address)mapped;
    note(*start, h.len, DEVICE_MEMORY, fd);
    return 0;
}

code cuIpcCloseMemHandle(address start) { return give_back(current(), start, 1); }

/* Physical memory and its mappings. Memory is there for nobody before cuMemSetAccess. */

enum { GRANULARITY = 2 << 20, DESCRIPTOR = 1, FABRIC = 8 };

struct properties {
    int kind, types, location_kind, location;
    void *rest[2];
};

struct physical {
    int fd, types;
    size_t len;
};

struct fabric_handle {
    int domain, pid, fd;
    size_t len;
    char rest[40];
};

code cuMemGetAllocationGranularity(size_t *bytes, const struct properties *of, int which) {
    return (void)of, (void)which, *bytes = GRANULARITY, 0;
}

static code take(struct physical **made, int fd, int types, size_t len) {
    if (fd < 0)
        return INVALID;
    *made = malloc(sizeof **made);
    **made = (struct physical){fd, types, len};
    return 0;
}

code cuMemCreate(struct physical **made, size_t len, const struct properties *of, uint64_t flags) {
    (void)flags;
    if (of->types & FABRIC && !domain)
        return NOT_PERMITTED;
    if (len == 0 || len % GRANULARITY)
        return INVALID;
    int fd = memfd_create("fake", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, len) != 0)
        return NO_MEMORY;
    return take(made, fd, of->types, len);
}

code cuMemRelease(struct physical *one) { return close(one->fd), free(one), 0; }

code cuMemExportToShareableHandle(void *place, struct physical *one, int type, uint64_t flags) {
    (void)flags;
    if (!(one->types & type))
        return INVALID;
    if (type == DESCRIPTOR)
        return *(int *)place = dup(one->fd), 0;
    *(struct fabric_handle *)place = (struct fabric_handle){domain, getpid(), one->fd, one->len, {0}};
    return 0;
}

code cuMemImportFromShareableHandle(struct physical **made, void *place, int type) {
    if (type == DESCRIPTOR) {
        struct stat found;
        int fd = dup((int)(intptr_t)place);
        return fd < 0 || fstat(fd, &found) ? INVALID : take(made, fd, type, found.st_size);
    }
    struct fabric_handle *h = place;
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", h->pid, h->fd);
    return !domain || h->domain != domain ? NOT_PERMITTED : take(made, open(path, O_RDWR | O_CLOEXEC), type, h->len);
}

code cuMemAddressReserve(address *base, size_t len, size_t align, address wish, uint64_t flags) {
    (void)align, (void)wish, (void)flags;
    void *start = len % GRANULARITY ? MAP_FAILED : mmap(NULL, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return start == MAP_FAILED ? INVALID : (*base = (address)start, 0);
}

code cuMemAddressFree(address base, size_t len) { return munmap((void *)base, len) ? INVALID : 0; }

code cuMemMap(address base, size_t len, size_t offset, struct physical *one, uint64_t flags) {
    (void)flags;
    if (offset || len != one->len)
        return INVALID;
    if (mmap((void *)base, len, PROT_NONE, MAP_SHARED | MAP_FIXED, one->fd, 0) == MAP_FAILED)
        return INVALID;
    note(base, len, DEVICE_MEMORY, -1);
    pthread_mutex_lock(&lock);
    memory_at(base)->is_mapped = 1;
    pthread_mutex_unlock(&lock);
    return 0;
}

code cuMemSetAccess(address base, size_t len, const void *of, size_t count) {
    (void)of, (void)count;
    return mprotect((void *)base, len, PROT_READ | PROT_WRITE) ? INVALID : 0;
}

/* Waits for no work: a GPU that still uses the memory loses its context, and the process here ends. */
code cuMemUnmap(address base, size_t len) {
    pthread_mutex_lock(&lock);
    int used = is_used(base);
    code result = used ? INVALID : forget(base, 0);
    pthread_mutex_unlock(&lock);
    if (used) {
        fprintf(stderr, "memory was unmapped under a copy\n");
        abort();
    }
    mmap((void *)base, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    return result;
}

code cuStreamCreateWithPriority(handle *made, unsigned flags, int priority) {
    (void)flags, (void)priority;
    struct stream *s = calloc(1, sizeof *s);
    pthread_mutex_lock(&lock);
    s->gpu = current();
    s->number = next_number++;
    s->next = streams;
    streams = s;
    pthread_mutex_unlock(&lock);
    return *made = s, 0;
}

/* What is enqueued goes on, and streams are few. */
code cuStreamDestroy_v2(handle h) { return (void)h, 0; }

code cuStreamQuery(handle h) {
    pthread_mutex_lock(&lock);
    code result = stream_of(h)->first ? NOT_READY : 0;
    pthread_mutex_unlock(&lock);
    return result;
}

code cuStreamSynchronize(handle h) {
    struct stream *s = stream_of(h);
    pthread_mutex_lock(&lock);
    uint64_t until = s->enqueued;
    while (s->done < until)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    return 0;
}

code cuStreamWaitEvent(handle h, handle event, unsigned flags) {
    (void)flags;
    struct event *e = event;
    struct work w = {.kind = WAIT_EVENT, .other = e->stream, .until = e->until};
    return e->stream ? enqueue(h, w) : 0;
}

code cuStreamWaitValue32_v2(handle h, address word, uint32_t value, unsigned flags) {
    (void)flags;
    return enqueue(h, (struct work){.kind = WAIT_VALUE, .word = (volatile uint32_t *)word, .value = value});
}

code cuFlushGPUDirectRDMAWrites(int target, int scope) {
    if (target != 0 || scope != 100)
        return INVALID;
    __atomic_fetch_add(&flushes, 1, __ATOMIC_SEQ_CST);
    return 0;
}

code cuStreamWaitValue64_v2(handle h, address word, uint64_t value, unsigned flags) {
    if (flags & 1u << 30)
        __atomic_fetch_add(&flushes, 1, __ATOMIC_SEQ_CST);
    volatile uint64_t *wide = (volatile uint64_t *)word;
    return enqueue(h, (struct work){.kind = WAIT_VALUE, .wide_word = wide, .wide_value = value});
}

code cuEventCreate(handle *made, unsigned flags) {
    (void)flags;
    return *made = calloc(1, sizeof(struct event)), 0;
}

code cuEventDestroy_v2(handle event) { return free(event), 0; }

code cuEventRecord(handle event, handle h) {
    struct event *e = event;
    pthread_mutex_lock(&lock);
    e->stream = stream_of(h);
    e->until = e->stream->enqueued;
    pthread_mutex_unlock(&lock);
    return 0;
}

code cuEventQuery(handle event) {
    struct event *e = event;
    pthread_mutex_lock(&lock);
    code result = e->stream && e->stream->done < e->until ? NOT_READY : 0;
    pthread_mutex_unlock(&lock);
    return result;
}

code cuEventSynchronize(handle event) {
    struct event *e = event;
    pthread_mutex_lock(&lock);
    while (e->stream && e->stream->done < e->until)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    return 0;
}

code cuMemcpyDtoDAsync_v2(address to, address from, size_t len, handle h) {
    return enqueue(h, (struct work){.kind = COPY, .one = {to, from, len}});
}
code cuMemcpyHtoDAsync_v2(address to, const void *from, size_t len, handle h) {
    return enqueue(h, (struct work){.kind = COPY, .one = {to, (address)from, len}});
}
code cuMemcpyDtoHAsync_v2(void *to, address from, size_t len, handle h) {
    return enqueue(h, (struct work){.kind = COPY, .one = {(address)to, from, len}});
}
code cuMemsetD8Async(address to, unsigned char value, size_t len, handle h) {
    return enqueue(h, (struct work){.kind = FILL, .one = {to, value, len}});
}

code cuModuleLoadDataEx(handle *made, const void *image, unsigned n, int *options, void **values) {
    (void)image, (void)n, (void)options, (void)values;
    *made = (handle)functions;
    return give_back(current(), 0, 0);
}
code cuModuleUnload(handle module) {
    (void)module;
    pthread_mutex_lock(&lock);
    wait_for(current());
    pthread_mutex_unlock(&lock);
    return 0;
}

code cuModuleGetFunction(handle *found, handle module, const char *name) {
    (void)module;
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (strcmp(functions[i].name, name) == 0)
            return *found = (handle)&functions[i], 0;
    for (int i = 0; i < emulated_count; i++)
        if (strcmp(emulations[i].name, name) == 0)
            return *found = &emulations[i], 0;
    return 500;
}

/* As kernels/copy.cuh has them. */
struct head {
    uint64_t flag, ticket, counter, word, value;
    uint32_t warps, adds;
};
struct cursor {
    uint64_t offset;
    uint32_t piece, zero;
};

static void read_tables(struct work *w, const address *places) {
    const struct cursor *cursors = (const void *)places[1];
    w->count = w->warps ? cursors[w->warps].piece : 0;
    w->pieces = malloc(w->count * sizeof *w->pieces + 1);
    memcpy(w->pieces, (const void *)places[0], w->count * sizeof *w->pieces);
}

/* How many blocks may begin together; 0: any number. */
static unsigned most_together;
void fake_limit_together(unsigned blocks) { most_together = blocks; }

code cuFuncLoad(handle f) { return (void)f, 0; }

/* The stream itself stands for its green context. */
code cuStreamGetGreenCtx(handle h, handle *green) { return *green = most_together ? h : NULL, 0; }
code cuGreenCtxGetDevResource(handle green, unsigned *resource, int kind) {
    (void)green;
    if (kind != 1)
        return 1;
    /* The count is behind a kind and 92 bytes. */
    return resource[24] = most_together, 0;
}

/* The launches of a graph. */
static struct {
    handle stream;
    struct work work;
} recorded[64];
static int recording, recorded_count;

void fake_record(int is_on) {
    recording = is_on;
    if (is_on)
        recorded_count = 0;
}

static code launch_emulated(handle stream, struct work w) {
    w.parameter = memcpy(malloc(w.emulated->len), w.parameter, w.emulated->len);
    return enqueue(stream, w);
}

code fake_replay(void) {
    code result = 0;
    for (int i = 0; i < recorded_count && result == 0; i++)
        result = launch_emulated(recorded[i].stream, recorded[i].work);
    return result;
}

code cuLaunchKernel(handle f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                    unsigned shared, handle h, void **parameters, void **extra) {
    (void)gy, (void)gz, (void)by, (void)bz, (void)shared, (void)extra;
    const struct emulated *emulated = f;
    if (emulated >= emulations && emulated < emulations + emulated_count) {
        struct work w = {.kind = EMULATED, .emulated = emulated, .blocks = gx, .threads = bx};
        w.parameter = parameters[0];
        if (recording && recorded_count < 64) {
            recorded[recorded_count].stream = h;
            recorded[recorded_count].work = w;
            recorded[recorded_count++].work.parameter = memcpy(malloc(emulated->len), parameters[0], emulated->len);
        }
        return launch_emulated(h, w);
    }
    pthread_mutex_lock(&lock);
    kernel_launches++;
    pthread_mutex_unlock(&lock);
    const struct function *kernel = f;
    const struct head *head = parameters[0];
    const char *tables = (const char *)(head + 1);
    struct work w = {.kind = KERNEL, .flag = (uint64_t *)head->flag, .ticket = head->ticket};
    w.changes = (uint64_t *)head->word, w.amount = head->value, w.adds = head->adds, w.warps = head->warps;
    if (kernel->pieces == 0) {
        memcpy(w.places, tables, sizeof w.places);
        pthread_mutex_lock(&lock);
        const struct memory *memory = memory_at(w.places[0]);
        w.in_gpu = memory && memory->type == DEVICE_MEMORY;
        table_launches += w.in_gpu;
        pthread_mutex_unlock(&lock);
    } else {
        w.places[0] = (address)tables;
        w.places[1] = (address)(tables + kernel->pieces * sizeof(struct piece));
    }
    if (!w.in_gpu)
        read_tables(&w, w.places);
    return enqueue(h, w);
}

struct launch_config {
    unsigned blocks[3], threads[3], shared;
    handle stream;
    const int *attributes;
    unsigned count;
};
code cuLaunchKernelEx(const struct launch_config *c, handle f, void **parameters, void **extra) {
    int is_together = c->count == 1 && c->attributes[0] == 2 && c->attributes[2] == 1;
    if (!is_together)
        return 1;
    if (most_together && c->blocks[0] > most_together)
        return 720;
    return cuLaunchKernel(f, c->blocks[0], c->blocks[1], c->blocks[2], c->threads[0], c->threads[1], c->threads[2],
                          c->shared, c->stream, parameters, extra);
}
