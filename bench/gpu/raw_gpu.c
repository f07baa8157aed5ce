/* What the CUDA driver's own copies reach, in one process, with nothing of the project in it: the referee.
 *
 *   raw_gpu MEMORY GPU OTHER SECONDS SIZE...
 *
 * MEMORY is what lies on the other side: "gpu" (of the GPU OTHER) or "pinned". For each size it prints
 *
 *   put SIZE MICROSECONDS GB/S         copies from GPU to the other side back to back, the time of each
 *   put-sync SIZE MICROSECONDS GB/S    one copy and the wait for it: the median time, the rate of all of them
 *
 * and the same for "get", the other way, by the same GPU. GB is 1e9 bytes. The driver is loaded at run time.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef unsigned long long address;
typedef void *handle;

static int (*init)(unsigned), (*device_get)(int *, int), (*retain)(handle *, int), (*set_current)(handle),
    (*enable_peer)(handle, unsigned), (*allocate)(address *, size_t), (*allocate_host)(void **, size_t, unsigned),
    (*make_stream)(handle *, unsigned), (*synchronize)(handle), (*copy)(address, address, size_t, handle);

static const struct {
    void *function;
    const char *name;
} table[] = {
    {&init, "cuInit"},
    {&device_get, "cuDeviceGet"},
    {&retain, "cuDevicePrimaryCtxRetain"},
    {&set_current, "cuCtxSetCurrent"},
    {&enable_peer, "cuCtxEnablePeerAccess"},
    {&allocate, "cuMemAlloc_v2"},
    {&allocate_host, "cuMemHostAlloc"},
    {&make_stream, "cuStreamCreate"},
    {&synchronize, "cuStreamSynchronize"},
    /* With unified addresses it tells by itself what lies where. */
    {&copy, "cuMemcpyAsync"},
};

static void fail(const char *what, int code) {
    fprintf(stderr, "%s failed with %d\n", what, code);
    exit(1);
}

static void check(int code, const char *what) {
    if (code != 0)
        fail(what, code);
}

static void load(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) {
        fprintf(stderr, "no CUDA driver: %s\n", dlerror());
        exit(1);
    }
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        void *found = dlsym(driver, table[i].name);
        if (!found)
            fail(table[i].name, -1);
        memcpy(table[i].function, &found, sizeof found);
    }
}

static handle context_of(int ordinal) {
    int device;
    handle context;
    check(device_get(&device, ordinal), "finding the GPU");
    check(retain(&context, device), "taking its context");
    return context;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void show(const char *name, size_t size, double each, double mean) {
    printf("%s %zu %.4f %.4f\n", name, size, each * 1e6, size / mean / 1e9);
}

#define BATCHES 5
#define MOST 100000

/* The median of batches of copies that follow each other, each about a fifth of the time. */
static void queued(const char *name, address to, address from, size_t size, double seconds, handle stream) {
    double each[BATCHES];
    long count = 1;
    for (int batch = -1; batch < BATCHES; batch++) {
        double start = now();
        for (long i = 0; i < count; i++)
            check(copy(to, from, size, stream), "a copy");
        check(synchronize(stream), "a copy");
        double took = now() - start;
        if (batch >= 0) {
            each[batch] = took / count;
        } else if (took < seconds / BATCHES / 4 && count < MOST) {
            count *= 4;
            batch--; /* not long enough to tell how many are wanted */
        } else {
            count = (long)(count * seconds / BATCHES / took) + 1;
        }
    }
    qsort(each, BATCHES, sizeof *each, ascending);
    show(name, size, each[BATCHES / 2], each[BATCHES / 2]);
}

static void waited(const char *name, address to, address from, size_t size, double seconds, handle stream) {
    static double each[MOST];
    long count = 0;
    double start = now(), before = start;
    while (count < 3 || (before - start < seconds && count < MOST)) {
        check(copy(to, from, size, stream), "a copy");
        check(synchronize(stream), "a copy");
        double after = now();
        each[count++] = after - before;
        before = after;
    }
    qsort(each, count, sizeof *each, ascending);
    show(name, size, each[count / 2], (before - start) / count);
}

int main(int argc, char **argv) {
    if (argc < 6)
        fail("raw_gpu MEMORY GPU OTHER SECONDS SIZE...", 0);
    int other_is_gpu = strcmp(argv[1], "gpu") == 0;
    double seconds = atof(argv[4]);
    size_t room = 0;
    for (int i = 5; i < argc; i++)
        if (strtoull(argv[i], NULL, 10) > room)
            room = strtoull(argv[i], NULL, 10);
    load();
    check(init(0), "starting the driver");
    handle mine = context_of(atoi(argv[2])), stream;
    address here, there;
    if (other_is_gpu) {
        handle other = context_of(atoi(argv[3]));
        check(set_current(other), "using the other context");
        check(allocate(&there, room), "taking memory of the other GPU");
        check(set_current(mine), "using the context");
        if (other != mine)
            check(enable_peer(other, 0), "reaching the other GPU");
    } else {
        void *start;
        check(set_current(mine), "using the context");
        check(allocate_host(&start, room, 1), "taking pinned memory");
        memset(start, 1, room);
        there = (address)start;
    }
    check(allocate(&here, room), "taking memory of the GPU");
    check(make_stream(&stream, 1), "making a stream");
    for (int i = 5; i < argc; i++) {
        size_t size = strtoull(argv[i], NULL, 10);
        waited("put-sync", there, here, size, seconds, stream);
        queued("put", there, here, size, seconds, stream);
        waited("get-sync", here, there, size, seconds, stream);
        queued("get", here, there, size, seconds, stream);
    }
    return 0;
}
