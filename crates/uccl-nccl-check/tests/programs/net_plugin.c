// A network plugin for NCCL with one table, v11: each communicator is a TCP stream over loopback that `test` drives.
// FAULT breaks one rule each, so that the check's tests see that it notices. With SIZES_ONLY sizes travel and bytes do
// not: a network that costs nothing, for the bench.
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define FAULT_NONE 0
#define FAULT_BYTE 1    // one byte of long messages is wrong
#define FAULT_BLOCK 2   // accept blocks
#define FAULT_PRINT 3   // something goes to standard output
#define FAULT_LATE 4    // a receive goes on after its communicator's end
#define FAULT_SPEED 5   // the speed is unknown
#define FAULT_SILENT 6  // a dead peer is no error
#define FAULT_FLAG 7    // the flags of lines land before their data

#ifndef FAULT
#define FAULT FAULT_NONE
#endif

enum { OK = 0, SYSTEM = 2, USAGE = 5, REMOTE = 6, REQUESTS = 32 };

typedef void (*Logger)(int, unsigned long, const char *, int, const char *, ...);
static Logger logger;

static int fail(int result, const char *why) {
  logger(2, ~0ul, __FILE__, __LINE__, "%s (%s)", why, strerror(errno));
  return result;
}

struct request {
  struct comm *comm;
  char *data;
  uint64_t size, done, header;
  size_t header_done;
  int in_use, is_done;
};

struct comm {
  int fd, failed;
  uint64_t first, next;
  struct request ring[REQUESTS];
};

struct listener {
  int fd;
};

struct handle {
  struct sockaddr_in at;
  int fd;
  int begun;
};

static int init(void **context, uint64_t id, void *config, Logger log, void *profiler) {
  (void)id, (void)config, (void)profiler;
  logger = log;
  *context = &logger;
  if (FAULT == FAULT_PRINT) {
    printf("hello\n");
    fflush(stdout);
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
  int physical, numbers[4];
  int pad;
  size_t p2p, coll;
  int multi;
};

static int properties(int device, struct properties *p) {
  memset(p, 0, sizeof *p);
  p->name = "loopback";
  p->memory = 1;
  p->speed = FAULT == FAULT_SPEED ? -1 : 100000;
  p->comms = 65536;
  p->recvs = 1;
  p->physical = 1;
  p->numbers[0] = device;
  p->p2p = p->coll = (size_t)1 << 40;
  return OK;
}

static int unblocked(int fd) { return fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK); }

static int listen_(void *context, int device, void *to, void **comm) {
  (void)context, (void)device;
  struct handle *handle = to;
  memset(handle, 0, sizeof *handle);
  handle->at.sin_family = AF_INET;
  handle->at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  socklen_t length = sizeof handle->at;
  if (fd < 0 || bind(fd, (void *)&handle->at, length) || listen(fd, 4096)) return fail(SYSTEM, "listen");
  if (getsockname(fd, (void *)&handle->at, &length) || (FAULT != FAULT_BLOCK && unblocked(fd)))
    return fail(SYSTEM, "listen");
  struct listener *made = calloc(1, sizeof *made);
  made->fd = fd;
  *comm = made;
  return OK;
}

static void *of_stream(int fd) {
  struct comm *comm = calloc(1, sizeof *comm);
  comm->fd = fd;
  return comm;
}

static int connect_(void *context, int device, void *to, void **comm, void **offload) {
  (void)context, (void)device, (void)offload;
  struct handle *handle = to;
  *comm = NULL;
  if (!handle->begun) {
    handle->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    handle->begun = 1;
  }
  if (connect(handle->fd, (void *)&handle->at, sizeof handle->at) && errno != EISCONN) {
    if (errno == EINPROGRESS || errno == EALREADY) return OK;
    fail(REMOTE, "connect");
    close(handle->fd);
    return REMOTE;
  }
  *comm = of_stream(handle->fd);
  return OK;
}

static int accept_(void *listener, void **comm, void **offload) {
  (void)offload;
  *comm = NULL;
  int fd = accept(((struct listener *)listener)->fd, NULL, NULL);
  if (fd < 0) return errno == EAGAIN ? OK : fail(SYSTEM, "accept");
  unblocked(fd);
  *comm = of_stream(fd);
  return OK;
}

static int reg(void *comm, void *data, size_t size, int type, void **mr) {
  (void)comm, (void)data, (void)size, (void)type;
  *mr = &logger;
  return OK;
}

static int dereg(void *comm, void *mr) {
  (void)comm, (void)mr;
  return OK;
}

static void *post(struct comm *comm, void *data, size_t size) {
  if (comm->next - comm->first == REQUESTS) return NULL;
  struct request *request = &comm->ring[comm->next % REQUESTS];
  if (request->in_use) return NULL;
  memset(request, 0, sizeof *request);
  request->comm = comm, request->data = data, request->size = size, request->in_use = 1;
  comm->next++;
  return request;
}

static int isend(void *comm, void *data, size_t size, int tag, void *mr, void *ph, void **out) {
  (void)tag, (void)mr, (void)ph;
  struct request *request = post(comm, data, size);
  if (request) request->header = size;
  *out = request;
  return OK;
}

static int irecv(void *comm, int n, void **data, size_t *sizes, int *tags, void **mrs, void **phs, void **out) {
  (void)tags, (void)mrs, (void)phs;
  if (n != 1) return fail(USAGE, "a group");
  struct request *request = post(comm, data[0], sizes[0]);
  if (request) request->header = UINT64_MAX;
  *out = request;
  return OK;
}

static int iflush(void *comm, int n, void **data, int *sizes, void **mrs, void **out) {
  (void)comm, (void)n, (void)data, (void)sizes, (void)mrs;
  *out = NULL;
  return OK;
}

// Moves some bytes: 1 if all are moved, 0 if the socket takes no more, -1 after an error.
static int move(int fd, void *at, size_t size, uint64_t *done, int sends) {
  while (*done < size) {
    ssize_t n = sends ? send(fd, (char *)at + *done, size - *done, MSG_NOSIGNAL)
                      : recv(fd, (char *)at + *done, size - *done, 0);
    if (n < 0 && errno == EAGAIN) return 0;
    if (n <= 0) return -1;
    *done += n;
  }
  return 1;
}

// Receives a message whole, then writes the second half of each 8 bytes (LL's flag) before all first halves.
static int move_flags_first(struct request *request) {
  static _Thread_local char message[1 << 20];
  if (request->size > sizeof message) {
    fail(USAGE, "a message is too long for this fault");
    return -1;
  }
  int moved = move(request->comm->fd, message, request->size, &request->done, 0);
  if (moved != 1) return moved;
  volatile uint32_t *words = (void *)request->data;
  for (size_t half = 2; half-- > 0; usleep(1000))
    for (size_t at = half; at < request->size / 4; at += 2) words[at] = ((uint32_t *)message)[at];
  return 1;
}

static int advance(struct comm *comm) {
  while (comm->first < comm->next) {
    struct request *request = &comm->ring[comm->first % REQUESTS];
    int sends = request->header != UINT64_MAX && request->header_done == 0;
    sends = sends || request->is_done == -1;
    uint64_t done = request->header_done;
    if (sends) request->is_done = -1;
    int moved = move(comm->fd, &request->header, 8, &done, sends);
    request->header_done = done;
    if (moved == 1) {
      if (!sends && request->header > request->size) return fail(USAGE, "a message is longer than its receive");
      if (!sends) request->size = request->header;
#ifndef SIZES_ONLY
      moved = FAULT == FAULT_FLAG && !sends ? move_flags_first(request)
                                            : move(comm->fd, request->data, request->size, &request->done, sends);
#endif
    }
    if (moved == 0 || (moved < 0 && FAULT == FAULT_SILENT)) return OK;
    if (moved < 0) return fail(REMOTE, "the peer has ended");
    if (FAULT == FAULT_BYTE && !sends && request->size > 100000) request->data[5000] ^= 1;
    request->is_done = 1;
    comm->first++;
  }
  return OK;
}

static int test(void *of, int *done, int *sizes) {
  struct request *request = of;
  *done = 0;
  if (request->is_done != 1) {
    int result = advance(request->comm);
    if (result) return result;
  }
  if (request->is_done != 1) return OK;
  *done = 1;
  if (sizes) *sizes = (int)request->size;
  request->in_use = 0;
  return OK;
}

static void *write_late(void *data) {
  usleep(5000);
  memset(data, 1, 1);
  return NULL;
}

static int close_(void *of) {
  struct comm *comm = of;
  if (FAULT == FAULT_LATE && comm->next > comm->first) {
    static pthread_t writer;
    pthread_create(&writer, NULL, write_late, comm->ring[comm->first % REQUESTS].data);
  }
  close(comm->fd);
  free(comm);
  return OK;
}

static int close_listen(void *of) {
  close(((struct listener *)of)->fd);
  free(of);
  return OK;
}

static int finalize(void *context) {
  (void)context;
  return OK;
}

const struct {
  const char *name;
  void *functions[21];
} ncclNetPlugin_v11 = {
    "Sockets",
    {init,   devices, properties, listen_, connect_,     accept_, reg,  NULL, dereg,    isend, irecv,
     iflush, test,    close_,     close_,  close_listen, NULL,    NULL, NULL, finalize, NULL},
};
