/* Connects that are polled: none of them blocks, and none leaves anything. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <uccl.h>

#include "check.h"

enum { MANY = 50 };

static uccl_endpoint_t *endpoint;

/* A listener that says nothing, and its address. */
static int silent(char *address, size_t size) {
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t len = sizeof at;
  int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  CHECK(listener >= 0 && bind(listener, (struct sockaddr *)&at, len) == 0 && listen(listener, 8) == 0);
  CHECK(getsockname(listener, (struct sockaddr *)&at, &len) == 0);
  snprintf(address, size, "127.0.0.1:%d", ntohs(at.sin_port));
  return listener;
}

/* Polls until the connect has a result. */
static uccl_status_t finish(uccl_connect_t *connect, uint64_t *conn) {
  uccl_status_t status;
  while ((status = uccl_connect_poll(connect, conn)) == UCCL_IN_PROGRESS) usleep(100);
  return status;
}

static void arguments(void) {
  uccl_connect_t *connect;
  uint64_t conn;
  CHECK(uccl_connect_begin(NULL, "127.0.0.1:1", -1, &connect) == UCCL_UNKNOWN_ID);
  CHECK(uccl_connect_begin(endpoint, NULL, -1, &connect) == UCCL_INVALID_ARGUMENT);
  CHECK(uccl_connect_begin(endpoint, "127.0.0.1:1", -1, NULL) == UCCL_INVALID_ARGUMENT);
  CHECK(uccl_connect_begin(endpoint, "127.0.0.1:1", 0, &connect) == UCCL_INVALID_ARGUMENT);
  CHECK(uccl_connect_begin(endpoint, "127.0.0.1:0", -1, &connect) == UCCL_INVALID_ARGUMENT);
  CHECK(uccl_connect_begin(endpoint, "localhost:1", -1, &connect) == UCCL_INVALID_ARGUMENT);
  CHECK(strstr(uccl_last_error(), "is a name"));
  CHECK(uccl_connect_poll(NULL, &conn) == UCCL_UNKNOWN_ID);
  CHECK(uccl_connect_cancel(NULL) == UCCL_UNKNOWN_ID);
}

static void cancelled(void) {
  char address[64];
  uccl_connect_t *connects[MANY];
  uint64_t conn;
  int listener = silent(address, sizeof address), fds = entries("/proc/self/fd"), threads = entries("/proc/self/task");
  for (int at = 0; at < MANY; ++at) {
    CHECK(uccl_connect_begin(endpoint, address, UCCL_TIMEOUT_NEVER, &connects[at]) == UCCL_OK);
    for (int polls = 0; polls < at; ++polls) CHECK(uccl_connect_poll(connects[at], &conn) == UCCL_IN_PROGRESS);
  }
  CHECK(entries("/proc/self/task") == threads);
  CHECK(uccl_connect_poll(connects[0], NULL) == UCCL_INVALID_ARGUMENT);
  for (int at = 0; at < MANY; ++at) {
    CHECK(uccl_connect_cancel(connects[at]) == UCCL_OK);
    CHECK(uccl_connect_poll(connects[at], &conn) == UCCL_UNKNOWN_ID);
    CHECK(uccl_connect_cancel(connects[at]) == UCCL_UNKNOWN_ID);
  }
  CHECK(entries("/proc/self/fd") == fds);
  CHECK(uccl_connect_begin(endpoint, address, 50, &connects[0]) == UCCL_OK);
  for (int times = 0; times < 2; ++times) {
    CHECK(finish(connects[0], &conn) == UCCL_CONNECT_FAILED);
    CHECK(strstr(uccl_last_error(), "no answer within 50ms"));
  }
  CHECK(uccl_connect_cancel(connects[0]) == UCCL_OK);
  close(listener);
  CHECK(uccl_connect_begin(endpoint, address, -1, &connects[0]) == UCCL_OK);
  CHECK(finish(connects[0], &conn) == UCCL_CONNECT_FAILED);
  CHECK(uccl_connect_cancel(connects[0]) == UCCL_OK);
}

/* One thread has both ends. */
static void connected(void) {
  char address[UCCL_ADDRESS_SIZE];
  uccl_endpoint_t *other;
  uccl_connect_t *connects[MANY];
  uccl_accepted_t accepted;
  uint64_t conns[MANY];
  int made = 0, taken = 0;
  CHECK(uccl_endpoint_create(NULL, &other) == UCCL_OK);
  CHECK(uccl_endpoint_address(other, address, sizeof address) == UCCL_OK);
  CHECK(uccl_accept(other, 0, &accepted) == UCCL_DEADLINE);
  for (int at = 0; at < MANY; ++at) {
    CHECK(uccl_connect_begin(endpoint, address, -1, &connects[at]) == UCCL_OK);
    conns[at] = 0;
  }
  while (made < MANY || taken < MANY) {
    for (int at = 0; at < MANY; ++at) {
      if (conns[at]) continue;
      uccl_status_t status = uccl_connect_poll(connects[at], &conns[at]);
      CHECK(status == UCCL_OK || status == UCCL_IN_PROGRESS);
      made += status == UCCL_OK;
    }
    uccl_status_t status = uccl_accept(other, 0, &accepted);
    CHECK(status == UCCL_OK || status == UCCL_DEADLINE);
    taken += status == UCCL_OK;
  }
  for (int at = 0; at < MANY; ++at) {
    CHECK(uccl_connect_cancel(connects[at]) == UCCL_OK);
    CHECK(uccl_check_connection(endpoint, conns[at]) == UCCL_OK);
    CHECK(uccl_disconnect(endpoint, conns[at]) == UCCL_OK);
  }
  CHECK(uccl_endpoint_destroy(other) == UCCL_OK);
}

/* A peer that stands still in the middle of a connect, and is killed then. */
static void killed(void) {
  char address[UCCL_ADDRESS_SIZE];
  uccl_connect_t *connect;
  uint64_t conn;
  int ends[2], status;
  CHECK(pipe(ends) == 0);
  pid_t peer = fork();
  CHECK(peer >= 0);
  if (peer == 0) {
    uccl_endpoint_t *own;
    alarm(120);
    CHECK(uccl_endpoint_create(NULL, &own) == UCCL_OK);
    memset(address, 0, sizeof address);
    CHECK(uccl_endpoint_address(own, address, sizeof address) == UCCL_OK);
    CHECK(write(ends[1], address, sizeof address) == (ssize_t)sizeof address);
    for (;;) pause();
  }
  CHECK(read(ends[0], address, sizeof address) == (ssize_t)sizeof address);
  close(ends[0]);
  close(ends[1]);
  CHECK(kill(peer, SIGSTOP) == 0 && waitpid(peer, &status, WUNTRACED) == peer && WIFSTOPPED(status));
  CHECK(uccl_connect_begin(endpoint, address, UCCL_TIMEOUT_NEVER, &connect) == UCCL_OK);
  for (int polls = 0; polls < 1000; ++polls) CHECK(uccl_connect_poll(connect, &conn) == UCCL_IN_PROGRESS);
  CHECK(kill(peer, SIGKILL) == 0 && waitpid(peer, &status, 0) == peer);
  CHECK(finish(connect, &conn) == UCCL_CONNECT_FAILED);
  CHECK(uccl_connect_cancel(connect) == UCCL_OK);
}

int main(void) {
  uccl_connect_t *connect;
  uint64_t conn;
  char address[64];
  setenv("UCCL_P2P_BIND", "127.0.0.1", 1);
  /* Any port, which nobody else takes when it is free again. */
  setenv("UCCL_P2P_BASE_PORT", "0", 1);
  alarm(120);
  CHECK(uccl_endpoint_create(NULL, &endpoint) == UCCL_OK);
  arguments();
  killed();
  cancelled();
  connected();
  int listener = silent(address, sizeof address);
  CHECK(uccl_connect_begin(endpoint, address, UCCL_TIMEOUT_NEVER, &connect) == UCCL_OK);
  CHECK(uccl_connect_poll(connect, &conn) == UCCL_IN_PROGRESS);
  CHECK(uccl_endpoint_destroy(endpoint) == UCCL_OK);
  CHECK(uccl_connect_poll(connect, &conn) == UCCL_CLOSED);
  CHECK(uccl_connect_cancel(connect) == UCCL_OK);
  close(listener);
  puts("every connect was polled to its end");
  return 0;
}
