// Two engines of this process that are connected, for the tests in C++.
#ifndef ENGINE_H
#define ENGINE_H

#include <uccl_engine.h>

#include <cstring>
#include <functional>
#include <string>
#include <thread>

#include "check.h"

// The call returns 0, or the program prints the reason and ends.
#define WELL(call)                                                                                      \
  do {                                                                                                  \
    int got = (call);                                                                                   \
    if (got != 0) {                                                                                     \
      fprintf(stderr, "%s:%d: %s: %d: %s\n", __FILE__, __LINE__, #call, got, uccl_engine_last_error()); \
      exit(1);                                                                                          \
    }                                                                                                   \
  } while (0)

inline void says(char const* text) {
  if (!std::strstr(uccl_engine_last_error(), text)) {
    fprintf(stderr, "%s does not say %s\n", uccl_engine_last_error(), text);
    exit(1);
  }
}

inline int port_of(uccl_engine_t* engine) {
  char* text = nullptr;
  WELL(uccl_engine_get_metadata(engine, &text));
  std::string const metadata(text);
  delete[] text;
  auto const question = metadata.find('?'), colon = metadata.rfind(':', question);
  CHECK(question != std::string::npos && colon != std::string::npos && question + 1 < metadata.size());
  CHECK(metadata.substr(0, colon) == "127.0.0.1");
  return std::stoi(metadata.substr(colon + 1));
}

// Polls a transfer until it has ended, and returns its status.
inline int ended(uccl_conn_t* conn, uint64_t transfer) {
  while (!uccl_engine_xfer_status(conn, transfer)) std::this_thread::yield();
  return uccl_engine_xfer_error(conn, transfer);
}

struct Pair {
  uccl_engine_t *a = uccl_engine_create(1, false), *b = uccl_engine_create(0, true);
  uccl_conn_t *to_b = nullptr, *to_a = nullptr;

  Pair() {
    CHECK(a && b);
    std::thread acceptor([this] {
      char ip[16];
      int gpu = -1;
      to_a = uccl_engine_accept(b, ip, sizeof ip, &gpu);
      CHECK(to_a && std::string(ip) == "127.0.0.1" && gpu == 0);
    });
    to_b = uccl_engine_connect(a, "127.0.0.1", "0000:4a:00.0", port_of(b), false);
    CHECK(to_b);
    acceptor.join();
  }
  Pair(Pair const&) = delete;
  ~Pair() {
    uccl_engine_conn_destroy(to_b);
    uccl_engine_destroy(a);
    uccl_engine_destroy(b);
  }
};

#endif
