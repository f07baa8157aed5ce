/* A peer that is killed: what waits for it ends with an error, and the endpoint is good for others. */
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <uccl.h>

#include "check.h"

struct offer {
  char address[UCCL_ADDRESS_SIZE];
  uccl_advert_t advert;
};

static char memory[1 << 20];

static void serve(int to) {
  uccl_endpoint_t *endpoint;
  struct offer offer;
  uint64_t mr;
  memset(&offer, 0, sizeof offer);
  CHECK(uccl_endpoint_create(NULL, &endpoint) == 0);
  CHECK(uccl_endpoint_address(endpoint, offer.address, sizeof offer.address) == 0);
  CHECK(uccl_register(endpoint, memory, sizeof memory, &mr) == 0);
  CHECK(uccl_advertise(endpoint, mr, memory, sizeof memory, &offer.advert) == 0);
  CHECK(write(to, &offer, sizeof offer) == (ssize_t)sizeof offer);
  for (;;) pause();
}

/* An endpoint, and its connection with a peer, which is a process of its own. */
struct scene {
  pid_t peer;
  struct offer offer;
  uccl_endpoint_t *endpoint;
  uint64_t conn, mr;
};

static struct scene begin(void) {
  struct scene s;
  int ends[2];
  CHECK(pipe(ends) == 0);
  s.peer = fork();
  CHECK(s.peer >= 0);
  if (s.peer == 0) {
    alarm(120);
    serve(ends[1]);
  }
  CHECK(read(ends[0], &s.offer, sizeof s.offer) == (ssize_t)sizeof s.offer);
  close(ends[0]);
  close(ends[1]);
  CHECK(uccl_endpoint_create(NULL, &s.endpoint) == 0);
  CHECK(uccl_connect(s.endpoint, s.offer.address, UCCL_TIMEOUT_DEFAULT, &s.conn) == 0);
  CHECK(uccl_register(s.endpoint, memory, sizeof memory, &s.mr) == 0);
  return s;
}

/* Has the peer killed soon, while this process waits for something. Ends with the peer. */
static pid_t soon(pid_t peer) {
  pid_t child = fork();
  CHECK(child >= 0);
  if (child) return child;
  usleep(300000);
  kill(peer, SIGKILL);
  _exit(0);
}

static void gone(pid_t child) {
  int status;
  CHECK(waitpid(child, &status, 0) == child);
}

/* When this returns, no thread of the peer does anything any more. */
static void stop(pid_t peer) {
  int status;
  CHECK(kill(peer, SIGSTOP) == 0);
  CHECK(waitpid(peer, &status, WUNTRACED) == peer && WIFSTOPPED(status));
}

static void count(void *context, uint64_t conn, const void *data, size_t len) {
  (void)conn, (void)data, (void)len;
  ++*(int *)context;
}

static void lost(uccl_status_t status) { CHECK(status == UCCL_CONNECTION_LOST && strstr(uccl_last_error(), "lost")); }

/* Each call that waits ends with the connection that it waits for. */
static void waits_end(int which) {
  struct scene s = begin();
  pid_t peer = s.peer;
  uccl_endpoint_t *endpoint = s.endpoint;
  uint64_t conn = s.conn, mr = s.mr, transfer, *word = (uint64_t *)memory;
  int seen = 0;
  uccl_iov_t iov = {mr, memory, sizeof memory};
  if (which < 2) stop(peer);
  pid_t killer = soon(peer);
  switch (which) {
    case 0: /* A notification that the peer does not take in. */
      lost(uccl_send_notif(endpoint, conn, "x", 1, UCCL_TIMEOUT_NEVER));
      break;
    case 1:
      CHECK(uccl_post_notif(endpoint, conn, "x", 1, UCCL_TIMEOUT_NEVER, &transfer) == UCCL_OK);
      lost(uccl_wait(endpoint, transfer, UCCL_TIMEOUT_NEVER, NULL));
      lost(uccl_poll(endpoint, transfer, NULL));
      break;
    case 2: /* A send that no receive meets. */
      lost(uccl_send(endpoint, conn, &iov, 1));
      break;
    case 3:
      lost(uccl_recv(endpoint, conn, &iov, 1, NULL));
      break;
    case 4:
      lost(uccl_take_notifs_from(endpoint, conn, UCCL_TIMEOUT_NEVER, count, &seen, NULL));
      CHECK(seen == 0);
      break;
    default:
      *word = 0;
      lost(uccl_wait_signal_from(endpoint, conn, mr, word, 1, UCCL_TIMEOUT_NEVER, NULL));
  }
  gone(killer);
  gone(peer);
  CHECK(uccl_endpoint_destroy(endpoint) == UCCL_OK);
}

int main(void) {
  int status;
  uint64_t transfer;
  setenv("UCCL_P2P_BIND", "127.0.0.1", 1);
  /* Any port, which nobody else takes when it is free again. */
  setenv("UCCL_P2P_BASE_PORT", "0", 1);
  setenv("UCCL_P2P_TIMEOUT_MS", "3000", 1);
  alarm(120);
  struct scene s = begin();
  pid_t child = s.peer;
  uccl_endpoint_t *endpoint = s.endpoint;
  struct offer offer = s.offer;
  uint64_t conn = s.conn, mr = s.mr;
  uccl_iov_t iov = {mr, memory, sizeof memory};
  CHECK(uccl_write(endpoint, conn, &iov, &offer.advert, 1) == UCCL_OK);

  uccl_request_t recv = {.conn = conn, .op = UCCL_RECV, .iovs = &iov, .count = 1, .timeout_ms = UCCL_TIMEOUT_NEVER};
  CHECK(uccl_post(endpoint, &recv, &transfer) == UCCL_OK);
  CHECK(kill(child, SIGKILL) == 0 && waitpid(child, &status, 0) == child && WIFSIGNALED(status));
  CHECK(uccl_wait(endpoint, transfer, 60000, NULL) == UCCL_CONNECTION_LOST);
  fprintf(stderr, "%s\n", uccl_last_error());
  CHECK(strstr(uccl_last_error(), "lost"));
  CHECK(uccl_write(endpoint, conn, &iov, &offer.advert, 1) == UCCL_CONNECTION_LOST);
  CHECK(uccl_poll(endpoint, transfer, NULL) == UCCL_CONNECTION_LOST);
  CHECK(uccl_connect(endpoint, offer.address, UCCL_TIMEOUT_DEFAULT, &conn) == UCCL_CONNECT_FAILED);
  CHECK(uccl_deregister(endpoint, mr) == UCCL_OK);
  CHECK(uccl_endpoint_destroy(endpoint) == UCCL_OK);
  for (int which = 0; which < 6; ++which) waits_end(which);
  puts("the peer was lost");
  return 0;
}
