// A one-sided plugin for NCCL with one table, v14: ranks of one host copy to and from each other's memory through the
// kernel, within the call. FAULT breaks one rule each, so that the check's tests see that it notices.
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define FAULT_NONE 0
#define FAULT_TYPE 1     // the device is not a proxy's
#define FAULT_LEAK 2     // a thread outlives finalize
#define FAULT_HANG 3     // connect waits for ever for a rank that does not come
#define FAULT_BYTE 4     // one byte of long puts is wrong
#define FAULT_EARLY 5    // a signal lands before its put
#define FAULT_TWICE 6    // some signals change their word twice
#define FAULT_GET 7      // one byte of long gets is wrong
#define FAULT_LOOSE 8    // long puts land later, and signals do not wait for them
#define FAULT_NULL 9     // a put that has ended gives no request
#define FAULT_REGION 10  // the end of a registration ends others of the same memory
#define FAULT_LATE 11    // a rank's memory changes after its group has been closed
#define FAULT_SLOW 12    // close waits for a rank
#define FAULT_SILENT 13  // a dead rank is no error
#define FAULT_BLOCK 14   // a call blocks

#ifndef FAULT
#define FAULT FAULT_NONE
#endif

enum { OK = 0, SYSTEM = 2, INTERNAL = 3, REMOTE = 6, RANKS = 16, REGIONS = 1024, INCREMENT = 1 };

typedef void (*Logger)(int, unsigned long, const char *, int, const char *, ...);
static Logger logger;

static int fail(int result, const char *why) {
  logger(2, ~0ul, __FILE__, __LINE__, "%s (%s)", why, strerror(errno));
  return result;
}

struct region {
  uint64_t base, size;
  int number, is_there;
};

// What other ranks read of a rank. It is never freed.
struct table {
  volatile int has_joined, has_left;
  int count;
  pthread_mutex_t lock;
  struct region regions[REGIONS];
};

struct handle {
  int pid;
  uint64_t table;
};

struct coll {
  int ranks, rank, has_failed, has_left[RANKS];
  struct handle peers[RANKS];
  struct table *own;
  int streams[2];
};

static int copy(int pid, void *local, uint64_t remote, size_t size, bool writes) {
  while (size > 0) {
    struct iovec here = {local, size}, there = {(void *)remote, size};
    ssize_t n = writes ? process_vm_writev(pid, &here, 1, &there, 1, 0) : process_vm_readv(pid, &here, 1, &there, 1, 0);
    if (n <= 0) return -1;
    local = (char *)local + n, remote += n, size -= n;
  }
  return 0;
}

static void *sleep_for_ever(void *nothing) {
  while (true) sleep(1000);
  return nothing;
}

static int init(void **context, uint64_t id, Logger log) {
  (void)id;
  logger = log;
  *context = &logger;
  // Where the kernel lets only parents read a process.
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  if (FAULT == FAULT_LEAK) {
    pthread_t thread;
    pthread_create(&thread, NULL, sleep_for_ever, NULL);
  }
  return OK;
}

static int devices(int *count) {
  *count = 1;
  return OK;
}

struct properties {
  const char *name, *pci;
  uint64_t guid;
  int memory, global, flush, speed, port;
  float latency;
  int comms, recvs, type, version;
  int physical, numbers[8];
  int pad;
  size_t p2p, coll;
  int multi;
  int16_t rail, plane;
};

static int properties(int device, struct properties *p) {
  memset(p, 0, sizeof *p);
  p->name = "memory";
  p->memory = 1;
  p->speed = 100000;
  p->comms = 65536;
  p->recvs = 8;
  p->type = FAULT == FAULT_TYPE ? 0 : 2;
  p->physical = 1;
  p->numbers[0] = device;
  p->p2p = p->coll = (size_t)1 << 30;
  return OK;
}

static int listen_(void *context, int device, void *to, void **comm) {
  (void)context, (void)device;
  struct table *own = calloc(1, sizeof *own);
  pthread_mutex_init(&own->lock, NULL);
  struct handle handle = {getpid(), (uint64_t)own};
  memcpy(to, &handle, sizeof handle);
  *comm = own;
  return OK;
}

static int has_joined(struct handle *peer, bool *joined) {
  struct table *theirs = (void *)peer->table;
  int word = 0;
  if (copy(peer->pid, &word, (uint64_t)&theirs->has_joined, sizeof word, false)) return -1;
  *joined = word;
  return 0;
}

// A TCP stream to itself that carries nothing, so that the check has one to end.
static int open_streams(int streams[2]) {
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof at;
  int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  streams[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (bind(listener, (void *)&at, length) || listen(listener, 1) || getsockname(listener, (void *)&at, &length))
    return -1;
  if (connect(streams[0], (void *)&at, length)) return -1;
  streams[1] = accept(listener, NULL, NULL);
  close(listener);
  return streams[1] < 0 ? -1 : 0;
}

static int connect_(void *context, void *handles[], int ranks, int rank, void *listener, void **out) {
  (void)context;
  struct coll *coll = calloc(1, sizeof *coll);
  coll->ranks = ranks, coll->rank = rank, coll->own = listener;
  coll->own->has_joined = 1;
  if (open_streams(coll->streams)) return fail(SYSTEM, "a stream");
  for (int at = 0; at < ranks; at++) memcpy(&coll->peers[at], handles[at], sizeof coll->peers[at]);
  time_t end = time(NULL) + 8;
  for (int at = 0; at < ranks; at++) {
    bool joined = false;
    while (!joined) {
      if (has_joined(&coll->peers[at], &joined)) return fail(REMOTE, "a rank is gone");
      if (FAULT != FAULT_HANG && time(NULL) > end) return fail(REMOTE, "a rank does not come");
      usleep(100);
    }
  }
  *out = coll;
  return OK;
}

static int create_context(void *coll, void *config, void **contexts) {
  (void)config;
  *contexts = coll;
  return OK;
}

static int reg(void *of, void *data, size_t size, int type, uint64_t flags, void **mr) {
  (void)type, (void)flags;
  struct table *own = ((struct coll *)of)->own;
  pthread_mutex_lock(&own->lock);
  int number = own->count++;
  pthread_mutex_unlock(&own->lock);
  if (number >= REGIONS) return fail(INTERNAL, "too many regions");
  own->regions[number] = (struct region){(uint64_t)data, size, number, 1};
  *mr = &own->regions[number];
  return OK;
}

static int dereg(void *of, void *mr) {
  struct table *own = ((struct coll *)of)->own;
  struct region *ended = mr;
  for (int at = 0; at < own->count; at++)
    if (FAULT == FAULT_REGION && own->regions[at].base == ended->base) own->regions[at].is_there = 0;
  ended->is_there = 0;
  return OK;
}

static int destroy_context(void *contexts) {
  (void)contexts;
  return OK;
}

static void *write_late(void *data) {
  usleep(5000);
  memset(data, 1, 1);
  return NULL;
}

static int close_coll(void *of) {
  struct coll *coll = of;
  coll->own->has_left = 1;
  close(coll->streams[0]), close(coll->streams[1]);
  if (FAULT == FAULT_SLOW) sleep(6);
  if (FAULT == FAULT_LATE && coll->own->count > 0) {
    pthread_t thread;
    pthread_create(&thread, NULL, write_late, (void *)coll->own->regions[0].base);
  }
  free(coll);
  return OK;
}

static int close_listen(void *listener) {
  (void)listener;
  return OK;
}

// The place of a rank's memory; 0 if it is not registered.
static uint64_t place(struct coll *coll, uint32_t rank, struct region *mr, uint64_t offset, size_t size) {
  struct table *theirs = (void *)coll->peers[rank].table;
  struct region region;
  uint64_t at = (uint64_t)&theirs->regions[mr->number];
  if (copy(coll->peers[rank].pid, &region, at, sizeof region, false)) return 0;
  return region.is_there && offset + size <= region.size ? region.base + offset : 0;
}

struct late_put {
  int pid;
  uint64_t to;
  size_t size;
  char bytes[];
};

static void *put_late(void *of) {
  struct late_put *put = of;
  usleep(3000);
  copy(put->pid, put->bytes, put->to, put->size, true);
  free(put);
  return NULL;
}

static int put_bytes(int pid, void *from, uint64_t to, size_t size) {
  if (FAULT == FAULT_LOOSE && size >= 16384) {
    struct late_put *put = malloc(sizeof *put + size);
    *put = (struct late_put){pid, to, size};
    memcpy(put->bytes, from, size);
    pthread_t thread;
    pthread_create(&thread, NULL, put_late, put);
    return pthread_detach(thread);
  }
  if (copy(pid, from, to, size, true)) return -1;
  char wrong = 0x55;
  return FAULT == FAULT_BYTE && size > 100000 ? copy(pid, &wrong, to + 5000, 1, true) : 0;
}

static int add(int pid, uint64_t at, uint64_t value) {
  static int count;
  uint64_t word;
  if (copy(pid, &word, at, sizeof word, false)) return -1;
  word += value;
  if (FAULT == FAULT_TWICE && ++count % 64 == 0) word += value;
  return copy(pid, &word, at, sizeof word, true);
}

static char ended;

static int iput_signal(void *of, int context, uint64_t from, void *from_mr, size_t size, uint64_t to, void *to_mr,
                       uint32_t rank, uint64_t word, void *word_mr, uint64_t value, uint32_t change, bool is_strong,
                       void **request) {
  (void)context, (void)is_strong;
  struct coll *coll = of;
  int pid = coll->peers[rank].pid;
  uint64_t at = word_mr ? place(coll, rank, word_mr, word, 8) : 0;
  uint64_t target = size ? place(coll, rank, to_mr, to, size) : 0;
  if ((word_mr && !at) || (size && !target)) return fail(REMOTE, "a region is not there");
  if (change == INCREMENT) value = 1;
  *request = &ended;
  if (FAULT == FAULT_BLOCK) usleep(1200000);
  if (FAULT == FAULT_EARLY && at) {
    if (add(pid, at, value)) return fail(REMOTE, "a signal");
    usleep(3000);
  }
  if (size && put_bytes(pid, (char *)((struct region *)from_mr)->base + from, target, size))
    return fail(REMOTE, "a put");
  if (FAULT != FAULT_EARLY && at && add(pid, at, value)) return fail(REMOTE, "a signal");
  return OK;
}

static int iput(void *of, int context, uint64_t from, void *from_mr, size_t size, uint64_t to, void *to_mr,
                uint32_t rank, void **request) {
  int result = iput_signal(of, context, from, from_mr, size, to, to_mr, rank, 0, NULL, 0, 0, false, request);
  if (FAULT == FAULT_NULL) *request = NULL;
  return result;
}

static int iget(void *of, int context, uint64_t from, void *from_mr, size_t size, uint64_t to, void *to_mr,
                uint32_t rank, void **request) {
  (void)context;
  struct coll *coll = of;
  char *here = (char *)((struct region *)to_mr)->base + to;
  uint64_t there = place(coll, rank, from_mr, from, size);
  if (!there || copy(coll->peers[rank].pid, here, there, size, false)) return fail(REMOTE, "a get");
  if (FAULT == FAULT_GET && size > 100000) here[5000] ^= 1;
  *request = &ended;
  return OK;
}

static int iflush(void *of, int context, void *mr, uint32_t rank, void **request) {
  (void)of, (void)context, (void)mr, (void)rank;
  *request = NULL;
  return OK;
}

static int test(void *coll, void *request, int *done) {
  (void)coll, (void)request;
  *done = 1;
  return OK;
}

static int progress(void *of) {
  struct coll *coll = of;
  for (int at = 0; at < coll->ranks; at++) {
    struct table *theirs = (void *)coll->peers[at].table;
    if (coll->has_left[at]) continue;
    if (copy(coll->peers[at].pid, &coll->has_left[at], (uint64_t)&theirs->has_left, sizeof(int), false) &&
        FAULT != FAULT_SILENT) {
      coll->has_failed = 1;
      return fail(REMOTE, "a rank is gone");
    }
  }
  return OK;
}

static int query(void *of, bool *has_failed) {
  *has_failed = ((struct coll *)of)->has_failed;
  return OK;
}

static int finalize(void *context) {
  (void)context;
  return OK;
}

const struct {
  const char *name;
  void *functions[20];
} ncclRmaPlugin_v14 = {
    "Memory",
    {init,  devices,         properties, listen_,      connect_, create_context, reg,  NULL,
     dereg, destroy_context, close_coll, close_listen, iput,     iput_signal,    iget, iflush,
     test,  progress,        query,      finalize},
};
