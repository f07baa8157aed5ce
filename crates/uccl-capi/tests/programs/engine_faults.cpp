// Faults, and calls for an engine that is gone: each call returns, and reports the reason.
#include "engine.h"

#include <csignal>
#include <sys/wait.h>

static char memory[1 << 16];

static uccl_mr_t registered(uccl_engine_t* engine) {
  uccl_mr_t mr = 0;
  WELL(uccl_engine_reg(engine, reinterpret_cast<uintptr_t>(memory), sizeof memory, mr));
  return mr;
}

static FifoItem item_of(uccl_engine_t* engine, uccl_mr_t mr) {
  FifoItem item;
  WELL(uccl_engine_prepare_fifo(engine, mr, memory, sizeof memory, reinterpret_cast<char*>(&item)));
  return item;
}

static void null_is_refused() {
  char buf[IPC_INFO_SIZE], ip[64];
  char* text = nullptr;
  int gpu;
  uint64_t id = 7;
  uccl_mr_t mr = 0;
  bool has = true;
  FifoItem item = {};
  CHECK(uccl_engine_destroy(nullptr) < 0);
  says("no such engine");
  CHECK(!uccl_engine_connect(nullptr, "127.0.0.1", "0", 1, false));
  CHECK(!uccl_engine_accept(nullptr, ip, sizeof ip, &gpu));
  CHECK(uccl_engine_stop_accept(nullptr) < 0);
  CHECK(uccl_engine_get_metadata(nullptr, &text) < 0 && !text);
  CHECK(uccl_engine_reg(nullptr, 1, 1, mr) < 0 && mr == 0);
  CHECK(uccl_engine_mr_destroy(nullptr, 1) < 0);
  CHECK(uccl_engine_prepare_fifo(nullptr, 1, memory, 1, buf) < 0);
  CHECK(uccl_engine_get_ipc_info(nullptr, 1, buf, &has) < 0 && !has);
  CHECK(uccl_engine_update_ipc_info(nullptr, 1, 1, 1) < 0);
  CHECK(uccl_engine_start_listener(nullptr) < 0 && uccl_engine_stop_listener(nullptr) < 0);
  says("no such connection");
  CHECK(!uccl_engine_conn_is_local(nullptr));
  CHECK(uccl_engine_conn_destroy(nullptr) < 0);
  CHECK(uccl_engine_read(nullptr, 1, memory, 1, item, &id) < 0 &&
        uccl_engine_write(nullptr, 1, memory, 1, item, &id) < 0);
  CHECK(uccl_engine_read_vector(nullptr, {}, {}, {}, {}, 0, &id) < 0);
  CHECK(uccl_engine_send(nullptr, 1, memory, 1, &id) < 0 && uccl_engine_recv(nullptr, 1, memory, 1) < 0 && id == 7);
  CHECK(uccl_engine_send_notif(nullptr, nullptr) < 0 && uccl_engine_send_notif_v(nullptr, nullptr) < 0);
  CHECK(uccl_engine_take_notifs(nullptr, nullptr) < 0);
  CHECK(uccl_engine_xfer_status(nullptr, 1) && uccl_engine_xfer_error(nullptr, 1) < 0);
  serialize_fifo_item(item, nullptr);
  deserialize_fifo_item(nullptr, &item);
  CHECK(uccl_engine_update_fifo(item, 1, 1) < 0);
  says("not an advert");
  CHECK(uccl_engine_get_notifs().empty());

  Pair p;
  CHECK(!uccl_engine_connect(p.a, nullptr, "0", 1, false));
  says("ip_addr is NULL");
  CHECK(!uccl_engine_connect(p.a, "127.0.0.1", nullptr, 0, false));
  says("remote_port");
  CHECK(!uccl_engine_connect(p.a, "127.0.0.1", "0", 65536, false));
  CHECK(!uccl_engine_accept(p.a, nullptr, 64, &gpu) && !uccl_engine_accept(p.a, ip, sizeof ip, nullptr));
  CHECK(uccl_engine_get_metadata(p.a, nullptr) < 0);
  CHECK(uccl_engine_send_notif(p.to_b, nullptr) < 0);
  mr = registered(p.a);
  item = item_of(p.b, registered(p.b));
  CHECK(uccl_engine_write(p.to_b, mr, memory, 1, item, nullptr) < 0);
  CHECK(uccl_engine_write(p.to_b, mr, nullptr, 1, item, &id) < 0);
  CHECK(uccl_engine_prepare_fifo(p.a, mr, memory, 1, nullptr) < 0);
}

static void a_call_that_does_not_fit_its_objects_is_refused() {
  Pair p;
  uccl_mr_t mr = registered(p.a), theirs = registered(p.b);
  FifoItem const item = item_of(p.b, theirs);
  uint64_t id = 0;
  CHECK(uccl_engine_write(p.to_b, mr, memory, sizeof memory + 1, item, &id) < 0);
  says("not inside region");
  CHECK(uccl_engine_prepare_fifo(p.a, mr, memory + 1, sizeof memory, memory) < 0);
  // An invalid part: the owner finds out, and the transfer ends.
  FifoItem outside = item;
  WELL(uccl_engine_update_fifo(outside, item.addr + sizeof memory - 5, 10));
  if (uccl_engine_write(p.to_b, mr, memory, 10, outside, &id) == 0) CHECK(ended(p.to_b, id) < 0);
  says("refused");
  CHECK(uccl_engine_update_fifo(outside, UINT64_MAX, 10) < 0);
  FifoItem forged = item;
  forged.padding[0] = static_cast<char>(forged.padding[0] ^ 1);
  if (uccl_engine_read(p.to_b, mr, memory, 10, forged, &id) == 0) CHECK(ended(p.to_b, id) < 0);
  WELL(uccl_engine_mr_destroy(p.b, theirs));
  if (uccl_engine_write(p.to_b, mr, memory, 10, item, &id) == 0) CHECK(ended(p.to_b, id) < 0);
  says("refused");
  CHECK(uccl_engine_xfer_status(p.to_b, 987654) && uccl_engine_xfer_error(p.to_b, 987654) < 0);
  says("transfer 987654");
  CHECK(uccl_engine_mr_destroy(p.a, 987654) < 0);
  says("region 987654");
  // Memory that a transfer uses stays registered.
  WELL(uccl_engine_send(p.to_a, theirs = registered(p.b), memory, sizeof memory, &id));
  CHECK(uccl_engine_mr_destroy(p.b, theirs) < 0);
  WELL(uccl_engine_recv(p.to_b, mr, memory, sizeof memory));
  WELL(ended(p.to_a, id));
  WELL(uccl_engine_mr_destroy(p.b, theirs));
  // A send that is longer than the receive.
  WELL(uccl_engine_send(p.to_b, mr, memory, 100, &id));
  theirs = registered(p.b);
  CHECK(uccl_engine_recv(p.to_a, theirs, memory, 10) < 0);
  CHECK(ended(p.to_b, id) < 0);
  says("longer than");
}

static void an_object_that_is_gone_is_refused() {
  uccl_engine_t* engine = uccl_engine_create(1, false);
  WELL(uccl_engine_destroy(engine));  // nothing was registered, nobody connected
  CHECK(uccl_engine_destroy(engine) < 0);
  says("no such engine");
  uccl_conn_t *gone, *left;
  {
    Pair p;
    gone = p.to_a;
    WELL(uccl_engine_conn_destroy(gone));
    CHECK(uccl_engine_conn_destroy(gone) < 0);
    says("no such connection");
    // The other end of a connection that was closed.
    uccl_mr_t const mr = registered(p.a);
    CHECK(uccl_engine_recv(p.to_b, mr, memory, 10) < 0);
    says("lost");
    left = p.to_b;
  }
  uint64_t id;
  notify_msg_t note = {};
  CHECK(uccl_engine_send(left, 1, memory, 1, &id) < 0 && uccl_engine_send_notif(left, &note) < 0);
  CHECK(uccl_engine_xfer_status(left, 1));
  CHECK(uccl_engine_conn_destroy(left) < 0);
}

static uccl_conn_t* accept_once(uccl_engine_t* engine) {
  char ip[64];
  int gpu;
  return uccl_engine_accept(engine, ip, sizeof ip, &gpu);
}

static void a_waiting_accept_ends(std::function<void(uccl_engine_t*)> const& end) {
  uccl_engine_t* engine = uccl_engine_create(1, false);
  std::thread acceptor([=] { CHECK(!accept_once(engine)); });
  usleep(20000);
  end(engine);
  acceptor.join();
  CHECK(!accept_once(engine));  // nor begins again
  uccl_engine_destroy(engine);
}

static void nobody_is_there() {
  uccl_engine_t *engine = uccl_engine_create(1, false), *gone = uccl_engine_create(1, false);
  int const port = port_of(gone);
  uccl_engine_destroy(gone);
  CHECK(!uccl_engine_connect(engine, "127.0.0.1", "0", port, false));
  says("cannot connect");
  CHECK(!uccl_engine_connect(engine, "no.such.host.invalid", "0", port, false));
  says("no.such.host.invalid");
  // A buffer that is too short for the IP closes the connection that came.
  uccl_engine_t* other = uccl_engine_create(1, false);
  uccl_conn_t* conn = uccl_engine_connect(other, "127.0.0.1", "0", port_of(engine), false);
  CHECK(conn);
  char ip[4];
  int gpu;
  CHECK(!uccl_engine_accept(engine, ip, sizeof ip, &gpu));
  says("room for 4");
  uccl_mr_t const mr = registered(other);
  CHECK(uccl_engine_recv(conn, mr, memory, 10) < 0);
  uccl_engine_destroy(other);
  uccl_engine_destroy(engine);
}

static void a_killed_peer_ends_transfers(pid_t peer, int port) {
  uccl_engine_t* engine = uccl_engine_create(1, false);
  uccl_conn_t* conn = uccl_engine_connect(engine, "127.0.0.1", "0", port, false);
  CHECK(conn);
  uccl_mr_t const mr = registered(engine);
  uint64_t id;
  int status;
  WELL(uccl_engine_send(conn, mr, memory, sizeof memory, &id));
  CHECK(!uccl_engine_xfer_status(conn, id) && uccl_engine_xfer_error(conn, id) == 1);
  CHECK(kill(peer, SIGKILL) == 0 && waitpid(peer, &status, 0) == peer);
  CHECK(ended(conn, id) < 0);
  says("lost");
  CHECK(ended(conn, id) < 0);  // asked again, the answer is the same
  CHECK(uccl_engine_send(conn, mr, memory, 1, &id) < 0);
  uccl_engine_conn_destroy(conn);
  uccl_engine_destroy(engine);
}

static void one_round() {
  Pair p;
  uccl_mr_t const mr = registered(p.a);
  FifoItem const item = item_of(p.b, registered(p.b));
  uint64_t id;
  WELL(uccl_engine_write(p.to_b, mr, memory, sizeof memory, item, &id));
  WELL(ended(p.to_b, id));
}

int main() {
  alarm(120);
  setenv("UCCL_P2P_BIND", "127.0.0.1", 1);
  setenv("UCCL_P2P_TIMEOUT_MS", "3000", 1);
  int ends[2], port = 0;
  CHECK(pipe(ends) == 0);
  pid_t const peer = fork();  // before there are threads
  CHECK(peer >= 0);
  if (peer == 0) {
    alarm(120);
    uccl_engine_t* engine = uccl_engine_create(1, false);
    port = port_of(engine);
    CHECK(write(ends[1], &port, sizeof port) == sizeof port);
    for (;;) pause();
  }
  CHECK(read(ends[0], &port, sizeof port) == sizeof port);
  a_killed_peer_ends_transfers(peer, port);

  null_is_refused();
  a_call_that_does_not_fit_its_objects_is_refused();
  an_object_that_is_gone_is_refused();
  a_waiting_accept_ends(uccl_engine_stop_accept);
  a_waiting_accept_ends(uccl_engine_destroy);
  nobody_is_there();

  int fds = 0, threads = 0;
  for (int i = 0; i < 110; i++) {
    if (i == 10) {
      fds = entries("/proc/self/fd");
      threads = entries("/proc/self/task");
    }
    one_round();
  }
  CHECK(entries("/proc/self/fd") <= fds && entries("/proc/self/task") <= threads);
  std::puts("every call returned, and said why");
  return 0;
}
