/* Memory that a peer publishes, named by its address alone. */
#include <string.h>
#include <uccl.h>

#include "well.h"

enum { SIZE = 4096 };
static unsigned char source[SIZE], target[SIZE];

int main(void) {
  uccl_endpoint_t *a, *b;
  uccl_config_t *config;
  uccl_accepted_t accepted;
  char address[UCCL_ADDRESS_SIZE];
  uint64_t conn, again, mr_a, mr_b;

  WELL(uccl_config_new(&config));
  WELL(uccl_config_set(config, "publish", "1"));
  WELL(uccl_endpoint_create(NULL, &a));
  WELL(uccl_endpoint_create(config, &b));
  WELL(uccl_config_free(config));
  WELL(uccl_endpoint_address(b, address, sizeof address));
  WELL(uccl_reach(a, address, UCCL_TIMEOUT_DEFAULT, &conn));
  WELL(uccl_accept(b, UCCL_TIMEOUT_DEFAULT, &accepted));
  WELL(uccl_reach(a, address, UCCL_TIMEOUT_DEFAULT, &again));
  CHECK(again == conn);

  for (int i = 0; i < SIZE; i++) source[i] = (unsigned char)(i * 7);
  WELL(uccl_register(a, source, SIZE, &mr_a));
  WELL(uccl_register(b, target, SIZE, &mr_b));
  uccl_address_piece_t pieces[2] = {
      {source, (uint64_t)(uintptr_t)(target + SIZE / 2), SIZE / 2},
      {source + SIZE / 2, (uint64_t)(uintptr_t)target, SIZE / 2},
  };
  CHECK(uccl_write_by_address(a, conn, pieces, 2, UCCL_TIMEOUT_DEFAULT) == UCCL_REFUSED);
  CHECK(strstr(uccl_last_error(), "not published"));
  WELL(uccl_publish(b, mr_b));
  CHECK(uccl_publish(a, mr_a) == UCCL_INVALID_ARGUMENT);
  WELL(uccl_write_by_address(a, conn, pieces, 2, 10000));
  CHECK(memcmp(target, source + SIZE / 2, SIZE / 2) == 0);
  CHECK(memcmp(target + SIZE / 2, source, SIZE / 2) == 0);
  memset(source, 0, SIZE);
  pieces[0].remote = (uint64_t)(uintptr_t)target, pieces[0].len = SIZE;
  WELL(uccl_read_by_address(a, conn, pieces, 1, UCCL_TIMEOUT_NEVER));
  CHECK(memcmp(target, source, SIZE) == 0);
  CHECK(uccl_read_by_address(a, conn, NULL, 1, 10000) == UCCL_INVALID_ARGUMENT);
  WELL(uccl_read_by_address(a, conn, NULL, 0, 10000));
  WELL(uccl_deregister(b, mr_b));
  CHECK(uccl_read_by_address(a, conn, pieces, 1, 10000) == UCCL_REFUSED);
  WELL(uccl_endpoint_destroy(a));
  WELL(uccl_endpoint_destroy(b));
  puts("moved by address");
  return 0;
}
