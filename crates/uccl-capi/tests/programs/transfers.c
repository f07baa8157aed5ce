/* What moves: vectors, messages, notifications; and what 100 rounds of it leave behind. */
#include <string.h>
#include <uccl.h>

#include "well.h"

enum { PIECES = 50, PIECE = 300, SIZE = PIECES * PIECE, LONG = 3 << 20 };
static unsigned char source[SIZE], target[2 * SIZE], back[SIZE];
static char long_note[LONG];

struct seen {
  uint64_t conn;
  size_t count, bytes;
  char last[16];
};

static void see(void *context, uint64_t conn, const void *data, size_t len) {
  struct seen *seen = context;
  seen->conn = conn;
  seen->count++;
  seen->bytes += len;
  memset(seen->last, 0, sizeof seen->last);
  memcpy(seen->last, data, len < 15 ? len : 15);
}

static void see_until(uccl_endpoint_t *endpoint, struct seen *seen, size_t count) {
  size_t taken;
  while (seen->count < count) {
    size_t before = seen->count;
    WELL(uccl_take_notifs(endpoint, 10000, see, seen, &taken));
    CHECK(taken > 0 && seen->count == before + taken);
  }
  CHECK(seen->count == count);
}

static void round_of(int number) {
  uccl_endpoint_t *a, *b;
  char address[UCCL_ADDRESS_SIZE], path[16];
  uccl_accepted_t accepted;
  uint64_t conn, mr_a, mr_back, mr_b, transfer, bytes = 0;
  uccl_advert_t whole, adverts[PIECES];
  uccl_iov_t from[PIECES], to[PIECES];
  struct seen seen = {0, 0, 0, ""};

  WELL(uccl_endpoint_create(NULL, &a));
  WELL(uccl_endpoint_create(NULL, &b));
  WELL(uccl_endpoint_address(b, address, sizeof address));
  WELL(uccl_connect(a, address, UCCL_TIMEOUT_DEFAULT, &conn));
  WELL(uccl_accept(b, UCCL_TIMEOUT_DEFAULT, &accepted));
  for (int i = 0; i < SIZE; i++) source[i] = (unsigned char)(i * 7 + number);
  memset(target, 0, sizeof target);
  memset(back, 0, sizeof back);
  WELL(uccl_register(a, source, sizeof source, &mr_a));
  WELL(uccl_register(a, back, sizeof back, &mr_back));
  WELL(uccl_register(b, target, sizeof target, &mr_b));
  WELL(uccl_advertise(b, mr_b, target, sizeof target, &whole));
  WELL(uccl_path(a, conn, &whole, path, sizeof path));
  char moves[8];
  WELL(uccl_moves(a, conn, moves, sizeof moves));
  CHECK(strcmp(moves, "direct") == 0 || strcmp(moves, "staged") == 0 || strcmp(moves, "tcp") == 0);
  CHECK(path[0] != 0);
  for (size_t i = 0; i < PIECES; i++) {
    WELL(uccl_advert_part(&whole, 2 * i * PIECE, PIECE, &adverts[i]));
    from[i] = (uccl_iov_t){mr_a, source + i * PIECE, PIECE};
    to[i] = (uccl_iov_t){mr_back, back + i * PIECE, PIECE};
  }

  uccl_request_t write = {.conn = conn,
                          .op = UCCL_WRITE,
                          .iovs = from,
                          .adverts = adverts,
                          .count = PIECES,
                          .notif = "written",
                          .notif_len = 7,
                          .timeout_ms = 10000};
  WELL(uccl_run(a, &write, &bytes));
  CHECK(bytes == SIZE);
  see_until(b, &seen, 1);
  CHECK(seen.conn == accepted.conn && strcmp(seen.last, "written") == 0);
  WELL(uccl_read(a, conn, to, adverts, PIECES));
  CHECK(memcmp(source, back, SIZE) == 0);
  for (size_t i = 0; i < PIECES; i++) {
    CHECK(memcmp(target + 2 * i * PIECE, source + i * PIECE, PIECE) == 0);
    CHECK(target[(2 * i + 1) * PIECE] == 0);
  }

  /* The other way round, into more room than is needed. */
  uccl_iov_t message[] = {{mr_b, target, SIZE / 2}, {mr_b, target + SIZE / 2, SIZE / 2 - 5}};
  uccl_iov_t room[] = {{mr_back, back, SIZE / 2}, {mr_back, back + SIZE / 2, SIZE / 2}};
  uccl_request_t recv = {.conn = conn, .op = UCCL_RECV, .iovs = room, .count = 2, .timeout_ms = 10000};
  WELL(uccl_post(a, &recv, &transfer));
  /* So long that the thread sleeps, on a descriptor that it keeps: some rounds would not, others would. */
  CHECK(uccl_wait(a, transfer, 5, &bytes) == UCCL_IN_PROGRESS);
  WELL(uccl_send(b, accepted.conn, message, 2));
  WELL(uccl_wait(a, transfer, 10000, &bytes));
  CHECK(bytes == SIZE - 5 && memcmp(back, target, SIZE - 5) == 0);

  WELL(uccl_send_notif(a, conn, "alone", 5, UCCL_TIMEOUT_DEFAULT));
  WELL(uccl_post_notif(a, conn, long_note, sizeof long_note, UCCL_TIMEOUT_DEFAULT, &transfer));
  see_until(b, &seen, 3);
  WELL(uccl_wait(a, transfer, 10000, NULL));
  CHECK(seen.bytes == 7 + 5 + sizeof long_note);
  WELL(uccl_take_notifs(b, 0, see, &seen, NULL));
  CHECK(seen.count == 3);

  /* A word of the peer's, when the bytes are there. */
  static _Alignas(8) uint64_t words[2];
  uint64_t mr_words, seen_value = 0;
  uccl_signal_t signal = {.value = 5, .change = UCCL_ADD, .strong = 1};
  words[0] = words[1] = 0;
  WELL(uccl_register(b, words, sizeof words, &mr_words));
  WELL(uccl_advertise(b, mr_words, &words[1], sizeof words[1], &signal.word));
  uccl_request_t signalled = {.conn = conn,
                              .op = UCCL_WRITE,
                              .iovs = from,
                              .adverts = adverts,
                              .count = PIECES,
                              .timeout_ms = 10000,
                              .signal = &signal,
                              .context = 3};
  WELL(uccl_run(a, &signalled, NULL));
  signalled.count = 0;
  WELL(uccl_post(a, &signalled, &transfer));
  WELL(uccl_wait_signal(b, mr_words, &words[1], 10, 10000, &seen_value));
  WELL(uccl_wait(a, transfer, 10000, NULL));
  CHECK(seen_value == 10 && words[0] == 0 && words[1] == 10);
  CHECK(uccl_wait_signal(b, mr_words, &words[0], 1, 10, NULL) == UCCL_DEADLINE);
  signal.change = 7;
  CHECK(uccl_run(a, &signalled, NULL) == UCCL_INVALID_ARGUMENT);
  WELL(uccl_deregister(b, mr_words));

  /* Memory that the peer maps. */
  void *shared;
  WELL(uccl_alloc(b, SIZE, &shared));
  WELL(uccl_register(b, shared, SIZE, &mr_b));
  WELL(uccl_advertise(b, mr_b, shared, SIZE, &whole));
  from[0].len = SIZE;
  WELL(uccl_write(a, conn, from, &whole, 1));
  CHECK(memcmp(shared, source, SIZE) == 0);
  /* Soon after it was registered. */
  do WELL(uccl_path(a, conn, &whole, path, sizeof path));
  while (strcmp(path, "mapped") != 0);

  WELL(uccl_deregister(a, mr_a));
  WELL(uccl_endpoint_destroy(a));
  WELL(uccl_endpoint_destroy(b));
  WELL(uccl_free(shared));
  CHECK(uccl_free(shared) == UCCL_UNKNOWN_ID);
}

int main(void) {
  int fds = 0, threads = 0;
  alarm(120);
  setenv("UCCL_P2P_BIND", "127.0.0.1", 1);
  for (int i = 0; i < 110; i++) {
    if (i == 10) {
      fds = entries("/proc/self/fd");
      threads = entries("/proc/self/task");
    }
    round_of(i);
  }
  fprintf(stderr, "fds %d then %d, threads %d then %d\n", fds, entries("/proc/self/fd"), threads,
          entries("/proc/self/task"));
  CHECK(entries("/proc/self/fd") <= fds && entries("/proc/self/task") <= threads);
  puts("100 rounds left nothing behind");
  return 0;
}
