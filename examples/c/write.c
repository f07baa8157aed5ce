/* Two processes: one has memory, the other writes it, reads it back and says so. Then something goes wrong, on purpose.
 *
 *     cc write.c $(pkg-config --cflags --libs uccl) -o write && ./write */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <uccl.h>

enum { SIZE = 1 << 20 };

/* What the writer must know of the other process. It goes through a socket here, and by any way between hosts. */
struct offer {
  char address[UCCL_ADDRESS_SIZE];
  uccl_advert_t advert;
};

static void must(uccl_status_t status, const char *what) {
  if (status != UCCL_OK) {
    fprintf(stderr, "%s: %s: %s\n", what, uccl_status_name(status), uccl_last_error());
    exit(1);
  }
}

static uccl_endpoint_t *new_endpoint(void) {
  uccl_config_t *config;
  uccl_endpoint_t *endpoint;
  must(uccl_config_new(&config), "config");
  must(uccl_config_set(config, "bind", "127.0.0.1"), "bind");
  must(uccl_config_set(config, "timeout_ms", "5000"), "timeout");
  must(uccl_endpoint_create(config, &endpoint), "endpoint");
  must(uccl_config_free(config), "config");
  return endpoint;
}

static void print_notif(void *context, uint64_t conn, const void *data, size_t len) {
  const unsigned char *memory = context;
  (void)conn;
  printf("owner: told \"%.*s\", and the memory has %d to %d\n", (int)len, (const char *)data, memory[0],
         memory[SIZE - 1]);
}

static int owner(int writer) {
  static unsigned char memory[SIZE];
  uccl_endpoint_t *endpoint = new_endpoint();
  struct offer offer;
  uint64_t mr;
  size_t taken;

  memset(&offer, 0, sizeof offer);
  must(uccl_endpoint_address(endpoint, offer.address, sizeof offer.address), "address");
  must(uccl_register(endpoint, memory, sizeof memory, &mr), "register");
  must(uccl_advertise(endpoint, mr, memory, sizeof memory, &offer.advert), "advertise");
  if (write(writer, &offer, sizeof offer) != (ssize_t)sizeof offer) {
    return 1;
  }
  must(uccl_take_notifs(endpoint, 10000, print_notif, memory, &taken), "take_notifs");
  if (taken == 0) {
    fprintf(stderr, "owner: nobody wrote\n");
    return 1;
  }
  /* The memory stays until the writer has gone. */
  char end;
  if (read(writer, &end, 1) != 0) {
    return 1;
  }
  must(uccl_endpoint_destroy(endpoint), "destroy");
  return 0;
}

static int writer(int owner) {
  static unsigned char data[SIZE], back[SIZE];
  uccl_endpoint_t *endpoint = new_endpoint();
  struct offer offer;
  uint64_t conn, mr, mr_back, transfer, bytes;
  uccl_status_t status;

  if (read(owner, &offer, sizeof offer) != (ssize_t)sizeof offer) {
    return 1;
  }
  must(uccl_connect(endpoint, offer.address, UCCL_TIMEOUT_DEFAULT, &conn), "connect");
  for (size_t i = 0; i < SIZE; i++) {
    data[i] = (unsigned char)(i / 4096);
  }
  must(uccl_register(endpoint, data, sizeof data, &mr), "register");
  must(uccl_register(endpoint, back, sizeof back, &mr_back), "register");

  /* Started now, waited for later; the notification arrives after the data. */
  uccl_iov_t iov = {.mr = mr, .ptr = data, .len = sizeof data};
  uccl_request_t request = {.conn = conn,
                            .op = UCCL_WRITE,
                            .iovs = &iov,
                            .adverts = &offer.advert,
                            .count = 1,
                            .notif = "it is there",
                            .notif_len = strlen("it is there"),
                            .timeout_ms = UCCL_TIMEOUT_DEFAULT};
  must(uccl_post(endpoint, &request, &transfer), "write");
  must(uccl_wait(endpoint, transfer, UCCL_TIMEOUT_DEFAULT, &bytes), "write");
  printf("writer: wrote %llu bytes\n", (unsigned long long)bytes);

  uccl_iov_t iov_back = {.mr = mr_back, .ptr = back, .len = sizeof back};
  must(uccl_read(endpoint, conn, &iov_back, &offer.advert, 1), "read");
  if (memcmp(data, back, SIZE) != 0) {
    fprintf(stderr, "writer: read something else\n");
    return 1;
  }
  printf("writer: read the same\n");

  /* Half of it does not fit the second half and one byte more. */
  uccl_advert_t part;
  must(uccl_advert_part(&offer.advert, SIZE / 2, SIZE / 2, &part), "part");
  iov.len = SIZE / 2 + 1;
  status = uccl_write(endpoint, conn, &iov, &part, 1);
  printf("writer: as expected, %s: %s\n", uccl_status_name(status), uccl_last_error());
  if (status != UCCL_OUT_OF_RANGE) {
    return 1;
  }
  must(uccl_endpoint_destroy(endpoint), "destroy");
  return 0;
}

int main(void) {
  int ends[2], status;
  pid_t child;
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0 || (child = fork()) < 0) {
    perror("fork");
    return 1;
  }
  /* Before any endpoint is made: its threads would not be in the child. */
  if (child == 0) {
    close(ends[0]);
    return owner(ends[1]);
  }
  close(ends[1]);
  int failed = writer(ends[0]);
  close(ends[0]);
  if (waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    failed = 1;
  }
  return failed;
}
