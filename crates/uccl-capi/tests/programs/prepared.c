/* Transfers that are checked once and posted often, and the ways in which a post is refused. */
#include <string.h>
#include <uccl.h>

#include "well.h"

enum { PIECES = 300, PIECE = 24, STRIDE = 32, SIZE = PIECES * STRIDE };
static unsigned char source[SIZE], target[SIZE], back[SIZE];

static void see(void *context, uint64_t conn, const void *data, size_t len) {
  unsigned char *notes = context;
  CHECK(conn != 0 && len == 1);
  notes[notes[0]++ + 1] = *(const unsigned char *)data;
}

static uccl_endpoint_t *endpoint_over(const char *transport) {
  uccl_config_t *config;
  uccl_endpoint_t *endpoint;
  WELL(uccl_config_new(&config));
  WELL(uccl_config_set(config, "transport", transport));
  WELL(uccl_endpoint_create(config, &endpoint));
  WELL(uccl_config_free(config));
  return endpoint;
}

static void over(const char *transport) {
  uccl_endpoint_t *a = endpoint_over(transport), *b = endpoint_over(transport);
  char address[UCCL_ADDRESS_SIZE];
  uccl_accepted_t accepted;
  uint64_t conn, mr_a, mr_back, mr_b, transfer, bytes;
  uccl_advert_t whole, adverts[PIECES];
  uccl_iov_t from[PIECES], to[PIECES];
  uccl_prepared_t *write, *read, *none = NULL;
  unsigned char notes[8] = {0};

  WELL(uccl_endpoint_address(b, address, sizeof address));
  WELL(uccl_connect(a, address, UCCL_TIMEOUT_DEFAULT, &conn));
  WELL(uccl_accept(b, UCCL_TIMEOUT_DEFAULT, &accepted));
  memset(target, 0, sizeof target);
  WELL(uccl_register(a, source, sizeof source, &mr_a));
  WELL(uccl_register(a, back, sizeof back, &mr_back));
  WELL(uccl_register(b, target, sizeof target, &mr_b));
  WELL(uccl_advertise(b, mr_b, target, sizeof target, &whole));
  for (size_t i = 0; i < PIECES; i++) {
    WELL(uccl_advert_part(&whole, i * STRIDE, PIECE, &adverts[i]));
    from[i] = (uccl_iov_t){mr_a, source + i * STRIDE, PIECE};
    to[i] = (uccl_iov_t){mr_back, back + i * STRIDE, PIECE};
  }
  WELL(uccl_prepare(a, UCCL_WRITE, from, adverts, PIECES, &write));
  WELL(uccl_prepare(a, UCCL_READ, to, adverts, PIECES, &read));
  /* The lists are no longer needed. */
  memset(from, 0, sizeof from);
  memset(to, 0, sizeof to);

  for (int round = 1; round <= 4; round++) {
    unsigned char note = (unsigned char)round;
    memset(source, round, sizeof source);
    memset(back, 0, sizeof back);
    WELL(uccl_post_prepared(a, conn, write, round % 2 ? NULL : &note, round % 2 ? 0 : 1, &transfer));
    WELL(uccl_wait(a, transfer, 10000, &bytes));
    CHECK(bytes == PIECES * PIECE);
    WELL(uccl_post_prepared(a, conn, read, NULL, 0, &transfer));
    WELL(uccl_wait(a, transfer, 10000, &bytes));
    for (size_t i = 0; i < SIZE; i++) {
      CHECK(target[i] == (i % STRIDE < PIECE ? round : 0));
      CHECK(back[i] == target[i]);
    }
  }
  while (notes[0] < 2) WELL(uccl_take_notifs(b, 10000, see, notes, NULL));
  CHECK(notes[0] == 2 && notes[1] == 2 && notes[2] == 4);

  /* Mistakes are refused when it is prepared. */
  from[0] = (uccl_iov_t){mr_a, source, PIECE};
  CHECK(uccl_prepare(a, UCCL_SEND, from, adverts, 1, &none) == UCCL_INVALID_ARGUMENT);
  CHECK(uccl_prepare(a, 9, from, adverts, 1, &none) == UCCL_INVALID_ARGUMENT);
  CHECK(uccl_prepare(a, UCCL_WRITE, from, adverts, 0, &none) == UCCL_INVALID_ARGUMENT);
  CHECK(uccl_prepare(a, UCCL_WRITE, NULL, adverts, 1, &none) == UCCL_INVALID_ARGUMENT);
  CHECK(uccl_prepare(a, UCCL_WRITE, from, adverts, 1, NULL) == UCCL_INVALID_ARGUMENT);
  from[0].len = PIECE + 1;
  CHECK(uccl_prepare(a, UCCL_WRITE, from, adverts, 1, &none) == UCCL_OUT_OF_RANGE);
  CHECK(none == NULL);

  /* A post by another endpoint, over an unknown connection, and of a handle that is none. */
  CHECK(uccl_post_prepared(b, accepted.conn, write, NULL, 0, &transfer) == UCCL_INVALID_ARGUMENT);
  CHECK(uccl_post_prepared(a, conn + 1, write, NULL, 0, &transfer) == UCCL_UNKNOWN_ID);
  CHECK(uccl_post_prepared(a, conn, NULL, NULL, 0, &transfer) == UCCL_UNKNOWN_ID);
  CHECK(uccl_post_prepared(a, conn, write, NULL, 0, NULL) == UCCL_INVALID_ARGUMENT);

  /* A region of ours that has ended is found by the post, one of the peer's by the peer. */
  WELL(uccl_deregister(a, mr_a));
  WELL(uccl_register(a, source, sizeof source, &mr_a));
  CHECK(uccl_post_prepared(a, conn, write, NULL, 0, &transfer) == UCCL_UNKNOWN_ID);
  WELL(uccl_deregister(b, mr_b));
  uccl_status_t refused = uccl_post_prepared(a, conn, read, NULL, 0, &transfer);
  if (refused == UCCL_OK) refused = uccl_wait(a, transfer, 10000, NULL);
  CHECK(refused == UCCL_REFUSED);

  WELL(uccl_prepared_free(write));
  CHECK(uccl_prepared_free(write) == UCCL_UNKNOWN_ID);
  WELL(uccl_disconnect(a, conn));
  CHECK(uccl_post_prepared(a, conn, read, NULL, 0, &transfer) != UCCL_OK);
  WELL(uccl_prepared_free(read));
  WELL(uccl_endpoint_destroy(a));
  WELL(uccl_endpoint_destroy(b));
}

int main(void) {
  alarm(120);
  setenv("UCCL_P2P_BIND", "127.0.0.1", 1);
  over("local");
  over("tcp");
  puts("prepared once, posted often");
  return 0;
}
