/* Every kind of failure that a program can bring about, and that each says why. */
#include <pthread.h>
#include <string.h>
#include <uccl.h>

#include "check.h"

/* The call fails so, and the text has this in it. */
#define FAILS(status, text, call)                                                                                  \
  do {                                                                                                             \
    uccl_status_t got = (call);                                                                                    \
    if (got != (status) || !strstr(uccl_last_error(), text)) {                                                     \
      fprintf(stderr, "%s:%d: %s: %s: %s\n", __FILE__, __LINE__, #call, uccl_status_name(got), uccl_last_error()); \
      exit(1);                                                                                                     \
    }                                                                                                              \
  } while (0)
#define WELL(call) FAILS(UCCL_OK, "", call)

enum { SIZE = 4096 };
static unsigned char here[SIZE], there[SIZE];
static uccl_endpoint_t *a, *b;
static uint64_t to_b, to_a, mr_a, mr_b;
static uccl_advert_t advert;

static uccl_endpoint_t *endpoint_with(const char *name, const char *value) {
  uccl_config_t *config;
  uccl_endpoint_t *endpoint;
  WELL(uccl_config_new(&config));
  WELL(uccl_config_set(config, "bind", "127.0.0.1"));
  WELL(uccl_config_set(config, "UCCL_P2P_TIMEOUT_MS", "5000"));
  if (name) WELL(uccl_config_set(config, name, value));
  WELL(uccl_endpoint_create(config, &endpoint));
  WELL(uccl_config_free(config));
  FAILS(UCCL_UNKNOWN_ID, "destroyed", uccl_config_free(config));
  return endpoint;
}

static void connect_both(void) {
  char address[UCCL_ADDRESS_SIZE];
  uccl_accepted_t accepted;
  WELL(uccl_endpoint_address(b, address, sizeof address));
  WELL(uccl_connect(a, address, 10000, &to_b));
  WELL(uccl_accept(b, 10000, &accepted));
  CHECK(strcmp(accepted.ip, "127.0.0.1") == 0 && accepted.gpu_index == 0);
  to_a = accepted.conn;
}

static uccl_request_t request(uccl_endpoint_t *of, uccl_op_t op, const uccl_iov_t *iov) {
  uccl_request_t request;
  memset(&request, 0, sizeof request);
  request.conn = of == a ? to_b : to_a;
  request.op = op;
  request.iovs = iov;
  request.adverts = op == UCCL_READ || op == UCCL_WRITE ? &advert : NULL;
  request.count = 1;
  request.timeout_ms = 10000;
  return request;
}

static void invalid_arguments(void) {
  uccl_iov_t iov = {mr_a, here, SIZE};
  uccl_request_t bad;
  uccl_advert_t nonsense;
  uccl_config_t *config;
  uint64_t id = 77;
  char text[4];

  FAILS(UCCL_INVALID_ARGUMENT, "endpoint is NULL", uccl_endpoint_create(NULL, NULL));
  FAILS(UCCL_INVALID_ARGUMENT, "address is NULL", uccl_connect(a, NULL, -1, &id));
  FAILS(UCCL_INVALID_ARGUMENT, "not an endpoint's address", uccl_connect(a, "nowhere", -1, &id));
  FAILS(UCCL_INVALID_ARGUMENT, "leaves no time", uccl_connect(a, "127.0.0.1:1", 0, &id));
  FAILS(UCCL_INVALID_ARGUMENT, "-3 ms", uccl_connect(a, "127.0.0.1:1", -3, &id));
  FAILS(UCCL_INVALID_ARGUMENT, "room for 4", uccl_endpoint_address(a, text, sizeof text));
  FAILS(UCCL_INVALID_ARGUMENT, "iovs is NULL", uccl_write(a, to_b, NULL, &advert, 1));
  FAILS(UCCL_INVALID_ARGUMENT, "adverts is NULL", uccl_write(a, to_b, &iov, NULL, 1));
  FAILS(UCCL_INVALID_ARGUMENT, "0 iovs", uccl_write(a, to_b, &iov, &advert, 0));
  FAILS(UCCL_INVALID_ARGUMENT, "1 to 65536", uccl_write(a, to_b, &iov, &advert, (size_t)-1));
  memset(&nonsense, 7, sizeof nonsense);
  FAILS(UCCL_INVALID_ARGUMENT, "not an advert", uccl_write(a, to_b, &iov, &nonsense, 1));
  bad = request(a, (uccl_op_t)9, &iov);
  FAILS(UCCL_INVALID_ARGUMENT, "op 9", uccl_post(a, &bad, &id));
  bad = request(a, UCCL_SEND, &iov);
  bad.adverts = &advert;
  FAILS(UCCL_INVALID_ARGUMENT, "no adverts", uccl_post(a, &bad, &id));
  bad = request(a, UCCL_RECV, &iov);
  bad.notif = "x";
  bad.notif_len = 1;
  FAILS(UCCL_INVALID_ARGUMENT, "receive cannot", uccl_post(a, &bad, &id));
  bad = request(a, UCCL_WRITE, &iov);
  bad.notif_len = 1;
  FAILS(UCCL_INVALID_ARGUMENT, "notif is NULL", uccl_post(a, &bad, &id));
  FAILS(UCCL_INVALID_ARGUMENT, "null pointer", uccl_register(a, NULL, SIZE, &id));
  FAILS(UCCL_INVALID_ARGUMENT, "address space", uccl_register(a, here, SIZE_MAX, &id));
  FAILS(UCCL_INVALID_ARGUMENT, "request is NULL", uccl_post(a, NULL, &id));
  FAILS(UCCL_INVALID_ARGUMENT, "take is NULL", uccl_take_notifs(a, 0, NULL, NULL, NULL));
  CHECK(id == 77);

  WELL(uccl_config_new(&config));
  FAILS(UCCL_INVALID_ARGUMENT, "no setting", uccl_config_set(config, "speed", "1"));
  FAILS(UCCL_INVALID_ARGUMENT, "UCCL_P2P_BIND", uccl_config_set(config, "bind", "nowhere"));
  FAILS(UCCL_INVALID_ARGUMENT, "value is NULL", uccl_config_set(config, "bind", NULL));
  FAILS(UCCL_INVALID_ARGUMENT, "UTF-8", uccl_config_set(config, "psk", "\xff"));
  WELL(uccl_config_free(config));
}

static void unknown_ids(void) {
  uccl_iov_t iov = {mr_a, here, SIZE};
  uint64_t id, mr;
  uccl_endpoint_t *short_lived = endpoint_with(NULL, NULL);
  WELL(uccl_endpoint_destroy(short_lived));
  FAILS(UCCL_UNKNOWN_ID, "endpoint", uccl_endpoint_destroy(short_lived));
  FAILS(UCCL_UNKNOWN_ID, "endpoint", uccl_register(short_lived, here, SIZE, &mr));
  FAILS(UCCL_UNKNOWN_ID, "endpoint", uccl_endpoint_destroy(NULL));
  FAILS(UCCL_UNKNOWN_ID, "endpoint", uccl_disconnect((uccl_endpoint_t *)here, 1));
  FAILS(UCCL_UNKNOWN_ID, "config", uccl_config_free((uccl_config_t *)a));
  FAILS(UCCL_UNKNOWN_ID, "connection 12345", uccl_write(a, 12345, &iov, &advert, 1));
  FAILS(UCCL_UNKNOWN_ID, "connection 12345", uccl_disconnect(a, 12345));
  FAILS(UCCL_UNKNOWN_ID, "transfer 12345", uccl_poll(a, 12345, NULL));
  FAILS(UCCL_UNKNOWN_ID, "transfer 12345", uccl_wait(a, 12345, -1, NULL));
  FAILS(UCCL_UNKNOWN_ID, "transfer 12345", uccl_cancel(a, 12345));
  FAILS(UCCL_UNKNOWN_ID, "region 12345", uccl_deregister(a, 12345));
  WELL(uccl_register(a, here, SIZE, &mr));
  WELL(uccl_deregister(a, mr));
  FAILS(UCCL_UNKNOWN_ID, "deregistered", uccl_deregister(a, mr));
  iov.mr = mr;
  FAILS(UCCL_UNKNOWN_ID, "deregistered", uccl_write(a, to_b, &iov, &advert, 1));
  uccl_request_t gone = request(a, UCCL_WRITE, &iov);
  FAILS(UCCL_UNKNOWN_ID, "deregistered", uccl_post(a, &gone, &id));
}

static void out_of_range(void) {
  uccl_iov_t past_region = {mr_a, here + 1, SIZE}, past_advert = {mr_a, here, SIZE};
  uccl_advert_t part, elsewhere;
  FAILS(UCCL_OUT_OF_RANGE, "iov 0", uccl_write(a, to_b, &past_region, &advert, 1));
  WELL(uccl_advert_part(&advert, 1, SIZE - 1, &part));
  FAILS(UCCL_OUT_OF_RANGE, "advertised", uccl_write(a, to_b, &past_advert, &part, 1));
  FAILS(UCCL_OUT_OF_RANGE, "advertised", uccl_advert_part(&advert, 1, SIZE, &part));
  FAILS(UCCL_OUT_OF_RANGE, "advertised", uccl_advert_part(&advert, UINT64_MAX, 1, &part));
  FAILS(UCCL_OUT_OF_RANGE, "not inside", uccl_advertise(b, mr_b, there + 1, SIZE, &elsewhere));
}

static void refused(void) {
  uccl_iov_t iov = {mr_a, here, SIZE};
  uccl_advert_t mine, revoked;
  uint64_t mr;
  WELL(uccl_advertise(a, mr_a, here, SIZE, &mine));
  FAILS(UCCL_REFUSED, "not from this connection's peer", uccl_write(a, to_b, &iov, &mine, 1));
  WELL(uccl_register(b, there, SIZE, &mr));
  WELL(uccl_advertise(b, mr, there, SIZE, &revoked));
  WELL(uccl_deregister(b, mr));
  FAILS(UCCL_REFUSED, "refused", uccl_write(a, to_b, &iov, &revoked, 1));
}

static void truncated(void) {
  uccl_iov_t longer = {mr_a, here, 100}, shorter = {mr_b, there, 10};
  uccl_request_t recv = request(b, UCCL_RECV, &shorter);
  uint64_t transfer, bytes = 0;
  memset(there, 9, SIZE);
  WELL(uccl_post(b, &recv, &transfer));
  FAILS(UCCL_TRUNCATED, "100 bytes", uccl_send(a, to_b, &longer, 1));
  FAILS(UCCL_TRUNCATED, "10 bytes", uccl_wait(b, transfer, 10000, &bytes));
  CHECK(there[10] == 9 && bytes == 0);
  /* Shorter than there is room for is no failure. */
  shorter.len = SIZE;
  recv = request(b, UCCL_RECV, &shorter);
  WELL(uccl_post(b, &recv, &transfer));
  WELL(uccl_send(a, to_b, &longer, 1));
  WELL(uccl_wait(b, transfer, 10000, &bytes));
  CHECK(bytes == 100 && memcmp(here, there, 100) == 0);
  uccl_stats_t stats;
  WELL(uccl_endpoint_stats(b, &stats));
  CHECK(stats.connections == 1 && stats.regions == 1 && stats.bytes_received == 100 && stats.transfers_failed == 1);
}

static void cancelled_and_late(void) {
  uccl_iov_t iov = {mr_a, here, SIZE};
  uccl_request_t recv = request(a, UCCL_RECV, &iov);
  uccl_accepted_t accepted;
  uint64_t transfer;
  WELL(uccl_post(a, &recv, &transfer));
  CHECK(uccl_poll(a, transfer, NULL) == UCCL_IN_PROGRESS);
  CHECK(uccl_wait(a, transfer, 1, NULL) == UCCL_IN_PROGRESS);
  FAILS(UCCL_INVALID_ARGUMENT, "", uccl_deregister(a, mr_a));
  FAILS(UCCL_CANCELLED, "cancelled", uccl_cancel(a, transfer));
  FAILS(UCCL_CANCELLED, "cancelled", uccl_poll(a, transfer, NULL));
  FAILS(UCCL_CANCELLED, "cancelled", uccl_cancel(a, transfer));
  recv.timeout_ms = 30;
  WELL(uccl_post(a, &recv, &transfer));
  FAILS(UCCL_DEADLINE, "deadline", uccl_wait(a, transfer, UCCL_TIMEOUT_NEVER, NULL));
  FAILS(UCCL_DEADLINE, "deadline", uccl_run(a, &recv, NULL));
  FAILS(UCCL_DEADLINE, "timed out", uccl_accept(a, 0, &accepted));
  FAILS(UCCL_DEADLINE, "timed out", uccl_accept(a, 10, &accepted));
}

static void nobody_there(void) {
  char address[UCCL_ADDRESS_SIZE];
  uint64_t conn;
  uccl_endpoint_t *gone = endpoint_with(NULL, NULL), *secret = endpoint_with("psk", "sixteen bytes or more");
  WELL(uccl_endpoint_address(gone, address, sizeof address));
  WELL(uccl_endpoint_destroy(gone));
  FAILS(UCCL_CONNECT_FAILED, "cannot connect", uccl_connect(a, address, UCCL_TIMEOUT_DEFAULT, &conn));
  WELL(uccl_endpoint_address(secret, address, sizeof address));
  FAILS(UCCL_CONNECT_FAILED, "pre-shared key", uccl_connect(a, address, UCCL_TIMEOUT_DEFAULT, &conn));
  WELL(uccl_endpoint_destroy(secret));
}

static uint64_t too_many(void) {
  enum { MOST = 65536 };
  uccl_iov_t iov = {mr_a, here, SIZE};
  uccl_request_t recv = request(a, UCCL_RECV, &iov);
  uint64_t transfer;
  recv.timeout_ms = UCCL_TIMEOUT_NEVER;
  for (int i = 0; i < MOST; i++) WELL(uccl_post(a, &recv, &transfer));
  uint64_t last = transfer;
  FAILS(UCCL_FULL, "full", uccl_post(a, &recv, &transfer));
  CHECK(transfer == last);
  return last;
}

/* What is unfinished fails with the connection. */
static void lost(uint64_t unfinished) {
  uccl_iov_t iov = {mr_a, here, SIZE};
  WELL(uccl_check_connection(a, to_b));
  WELL(uccl_disconnect(b, to_a));
  FAILS(UCCL_UNKNOWN_ID, "connection", uccl_disconnect(b, to_a));
  FAILS(UCCL_CONNECTION_LOST, "lost", uccl_wait(a, unfinished, 60000, NULL));
  FAILS(UCCL_CONNECTION_LOST, "lost", uccl_recv(a, to_b, &iov, 1, NULL));
  FAILS(UCCL_CONNECTION_LOST, "lost", uccl_check_connection(a, to_b));
  WELL(uccl_disconnect(a, to_b));
}

static void *accept_until_closed(void *endpoint) {
  uccl_accepted_t accepted;
  FAILS(UCCL_CLOSED, "closed", uccl_accept(endpoint, UCCL_TIMEOUT_NEVER, &accepted));
  return endpoint;
}

static void destroyed_meanwhile(void) {
  uccl_endpoint_t *endpoint = endpoint_with(NULL, NULL);
  pthread_t thread;
  void *returned;
  CHECK(pthread_create(&thread, NULL, accept_until_closed, endpoint) == 0);
  usleep(20000);
  WELL(uccl_endpoint_destroy(endpoint));
  CHECK(pthread_join(thread, &returned) == 0 && returned == endpoint);
}

static void system_refuses(void) {
  uccl_config_t *config;
  uccl_endpoint_t *endpoint;
  WELL(uccl_config_new(&config));
  WELL(uccl_config_set(config, "bind", "198.51.100.1"));
  FAILS(UCCL_SYSTEM, "198.51.100.1", uccl_endpoint_create(config, &endpoint));
  WELL(uccl_config_free(config));
}

int main(void) {
  alarm(120);
  CHECK(strcmp(uccl_last_error(), "") == 0);
  CHECK(strcmp(uccl_status_name(UCCL_OK), "ok") == 0 && strcmp(uccl_status_name(99), "unknown status") == 0);
  CHECK(strchr(uccl_version(), '.'));
  a = endpoint_with(NULL, NULL);
  b = endpoint_with(NULL, NULL);
  connect_both();
  WELL(uccl_register(a, here, SIZE, &mr_a));
  WELL(uccl_register(b, there, SIZE, &mr_b));
  WELL(uccl_advertise(b, mr_b, there, SIZE, &advert));

  invalid_arguments();
  unknown_ids();
  out_of_range();
  refused();
  truncated();
  cancelled_and_late();
  nobody_there();
  lost(too_many());
  destroyed_meanwhile();
  system_refuses();
  WELL(uccl_endpoint_destroy(a));
  WELL(uccl_endpoint_destroy(b));
  puts("each failure said why");
  return 0;
}
