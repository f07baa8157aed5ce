// Calls every function of uccl_engine.h, as a C++ compiler understands the header.
#include "engine.h"

#include <new>

// The program's own allocator, which must get back exactly the memory that it gave.
static size_t given = 0;
void* operator new(size_t size) {
  size_t* room = static_cast<size_t*>(std::malloc(size + 2 * sizeof(size_t)));
  if (!room) throw std::bad_alloc();
  room[0] = 0x5eed;
  __atomic_add_fetch(&given, 1, __ATOMIC_SEQ_CST);
  return room + 2;
}
void operator delete(void* memory) noexcept {
  if (!memory) return;
  size_t* room = static_cast<size_t*>(memory) - 2;
  CHECK(room[0] == 0x5eed);
  std::free(room);
}
void operator delete(void* memory, size_t) noexcept { operator delete(memory); }

static constexpr size_t kSize = 64 * 1024;
static std::vector<char> here(kSize), there(kSize);
static uccl_mr_t mr_here = 0, mr_there = 0;

static FifoItem whole_of(Pair& p) {
  char buf[FIFO_SIZE], again[FIFO_SIZE];
  FifoItem item;
  WELL(uccl_engine_prepare_fifo(p.b, mr_there, there.data(), kSize, buf));
  deserialize_fifo_item(buf, &item);
  serialize_fifo_item(item, again);
  CHECK(std::memcmp(buf, again, FIFO_SIZE) == 0);
  CHECK(item.addr == reinterpret_cast<uint64_t>(there.data()) && item.size == kSize);
  return item;
}

static void pattern(char seed) {
  for (size_t i = 0; i < kSize; i++) here[i] = static_cast<char>(seed + i * 31 + i / 256);
  std::fill(there.begin(), there.end(), '-');
}

static void one_piece(Pair& p, FifoItem whole) {
  uint64_t id = 0;
  pattern(1);
  WELL(uccl_engine_write(p.to_b, mr_here, here.data(), kSize, whole, &id));
  WELL(ended(p.to_b, id));
  WELL(uccl_engine_xfer_error(p.to_b, id));
  CHECK(here == there);
  // A part, as the item is patched.
  pattern(2);
  FifoItem part = whole;
  WELL(uccl_engine_update_fifo(part, whole.addr + 1000, 77));
  CHECK(part.addr == whole.addr + 1000 && part.size == 77);
  WELL(uccl_engine_write(p.to_b, mr_here, here.data(), 77, part, &id));
  WELL(ended(p.to_b, id));
  CHECK(std::memcmp(here.data(), there.data() + 1000, 77) == 0 && there[999] == '-' && there[1077] == '-');
  std::vector<char> first(here.begin(), here.begin() + 77);
  std::fill(here.begin(), here.end(), '+');
  WELL(uccl_engine_read(p.to_b, mr_here, here.data() + 5, 77, part, &id));
  WELL(ended(p.to_b, id));
  CHECK(std::memcmp(here.data() + 5, first.data(), 77) == 0 && here[4] == '+' && here[82] == '+');
}

static void vectors(Pair& p, FifoItem whole) {
  constexpr int kPieces = 100;
  constexpr uint32_t kPiece = 300;
  std::vector<uccl_mr_t> mrs(kPieces, mr_here);
  std::vector<void*> at;
  std::vector<size_t> sizes(kPieces, kPiece);
  std::vector<FifoItem> items(kPieces, whole);
  for (int i = 0; i < kPieces; i++) {
    at.push_back(here.data() + i * kPiece);
    WELL(uccl_engine_update_fifo(items[i], whole.addr + 2 * i * kPiece, kPiece));
  }
  uint64_t id = 0;
  pattern(3);
  WELL(uccl_engine_write_vector(p.to_b, mrs, at, sizes, items, kPieces, &id));
  WELL(ended(p.to_b, id));
  for (int i = 0; i < kPieces; i++) {
    CHECK(std::memcmp(there.data() + 2 * i * kPiece, at[i], kPiece) == 0 && there[(2 * i + 1) * kPiece] == '-');
  }
  std::vector<char> const sent = here;
  std::fill(here.begin(), here.end(), '+');
  WELL(uccl_engine_read_vector(p.to_b, mrs, at, sizes, items, kPieces, &id, std::vector<char*>(kPieces, nullptr)));
  WELL(ended(p.to_b, id));
  CHECK(std::memcmp(here.data(), sent.data(), kPieces * kPiece) == 0 && here[kPieces * kPiece] == '+');
  // Only num_iovs pieces move.
  pattern(4);
  WELL(uccl_engine_write_vector(p.to_b, mrs, at, sizes, items, 1, &id));
  WELL(ended(p.to_b, id));
  CHECK(there[0] == here[0] && there[2 * kPiece] == '-');
  CHECK(uccl_engine_write_vector(p.to_b, mrs, at, sizes, items, kPieces + 1, &id) < 0);
  says("has 100 elements");
  CHECK(uccl_engine_read_vector(p.to_b, mrs, at, sizes, {}, 1, &id) < 0);
  says("fifo_items has 0");
  CHECK(uccl_engine_read_vector(p.to_b, mrs, at, sizes, items, -1, &id) < 0);
  says("num_iovs is -1");
  CHECK(uccl_engine_read_vector(p.to_b, mrs, at, sizes, items, 0, &id) < 0);
}

static void ipc_info(Pair& p, FifoItem whole) {
  char info[IPC_INFO_SIZE], part[IPC_INFO_SIZE];
  bool has = false;
  auto const base = reinterpret_cast<uintptr_t>(there.data());
  WELL(uccl_engine_get_ipc_info(p.b, base, info, &has));
  CHECK(has);
  std::memcpy(part, info, sizeof part);
  WELL(uccl_engine_update_ipc_info(part, base + 4000, base, 50));
  CHECK(uccl_engine_conn_is_local(p.to_b));
  uint64_t id = 0;
  pattern(5);
  // The second piece has no IPC info, and goes to the place that its item names.
  FifoItem second = whole;
  WELL(uccl_engine_update_fifo(second, whole.addr + 8000, 50));
  WELL(uccl_engine_write_vector(p.to_b, {mr_here, mr_here}, {here.data(), here.data() + 50}, {50, 50}, {whole, second},
                                2, &id, {part, nullptr}));
  WELL(ended(p.to_b, id));
  CHECK(std::memcmp(there.data() + 4000, here.data(), 50) == 0 &&
        std::memcmp(there.data() + 8000, here.data() + 50, 50) == 0);
  CHECK(there[0] == '-' && there[4050] == '-' && there[8050] == '-');
  CHECK(uccl_engine_update_ipc_info(part, base - 1, base, 50) < 0);
  CHECK(uccl_engine_update_ipc_info(part, base, base, kSize + 1) < 0);
  CHECK(uccl_engine_get_ipc_info(p.b, base - 1, info, &has) < 0 && !has);
  says("no memory is registered");
}

static void two_sided(Pair& p) {
  uint64_t id = 0;
  pattern(6);
  WELL(uccl_engine_send(p.to_b, mr_here, here.data(), 100, &id));
  WELL(uccl_engine_recv(p.to_a, mr_there, there.data(), kSize));
  WELL(ended(p.to_b, id));
  CHECK(std::memcmp(here.data(), there.data(), 100) == 0 && there[100] == '-');
  std::vector<void const*> from = {here.data() + 1000, here.data()};
  WELL(uccl_engine_send_vector(p.to_b, {mr_here, mr_here}, from, {10, 20}, 2, &id));
  WELL(uccl_engine_recv_vector(p.to_a, {mr_there, mr_there}, {there.data(), there.data() + 500}, {10, 20}, 2));
  WELL(ended(p.to_b, id));
  CHECK(std::memcmp(there.data(), here.data() + 1000, 10) == 0 &&
        std::memcmp(there.data() + 500, here.data(), 20) == 0);
  // In the other direction, over the same connection.
  WELL(uccl_engine_send(p.to_a, mr_there, there.data() + 500, 20, &id));
  WELL(uccl_engine_recv(p.to_b, mr_here, here.data(), 20));
  WELL(ended(p.to_a, id));
}

static std::vector<notify_msg_t> notifs(size_t count) {
  std::vector<notify_msg_t> all;
  while (all.size() < count) {
    std::vector<notify_msg_t> some = uccl_engine_get_notifs();
    all.insert(all.end(), some.begin(), some.end());
  }
  CHECK(all.size() == count);
  return all;
}

static void notifications(Pair& p) {
  WELL(uccl_engine_start_listener(p.to_b));
  CHECK(uccl_engine_get_notifs().empty());
  notify_msg_t note;
  std::memset(&note, 'x', sizeof note);  // no NUL anywhere
  WELL(uccl_engine_send_notif(p.to_b, &note));
  CHECK(std::memcmp(&notifs(1)[0], &note, sizeof note) == 0);
  notify_msg_t binary = {};
  std::memcpy(binary.msg, "a\0b\0\0c", 6);
  for (int i = 0; i < 300; i++) {
    std::snprintf(binary.name, sizeof binary.name, "agent %d", i);
    WELL(uccl_engine_send_notif(i % 2 ? p.to_b : p.to_b, &binary));
  }
  size_t const before = given;
  std::vector<notify_msg_t> const all = notifs(300);
  CHECK(given > before);
  for (int i = 0; i < 300; i++) {
    CHECK(std::string(all[i].name) == "agent " + std::to_string(i));
    CHECK(std::memcmp(all[i].msg, binary.msg, MSG_SIZE) == 0);
  }
  // In both directions; longer notifications are left for the call that can return them.
  std::string const text(100000, 'y');
  notify_msg_v_t const long_one = {"long", text}, short_one = {std::string("n\0m", 3), ""};
  WELL(uccl_engine_send_notif_v(p.to_a, &long_one));
  WELL(uccl_engine_send_notif_v(p.to_a, &short_one));
  CHECK(std::memcmp(notifs(1)[0].name, "n\0m", 4) == 0);
  std::vector<notify_msg_v_t> const longer = uccl_engine_get_notifs_v();
  CHECK(longer.size() == 1 && longer[0].name == "long" && longer[0].msg == text);
  WELL(uccl_engine_stop_listener(p.to_b));
}

// The calls that NIXL makes for transfers within an agent.
static void with_itself(Pair& p) {
  uccl_conn_t* other = nullptr;
  std::thread acceptor([&] {
    char ip[64];
    int gpu;
    other = uccl_engine_accept(p.b, ip, sizeof ip, &gpu);
  });
  uccl_conn_t* self = uccl_engine_connect(p.b, "127.0.0.1", "", port_of(p.b), true);
  acceptor.join();
  CHECK(self && other && self != other && uccl_engine_conn_is_local(self));
  FifoItem item = whole_of(p);
  uint64_t id;
  std::fill(there.begin(), there.end(), 'a');
  std::fill(there.begin(), there.begin() + 100, 'b');
  WELL(uccl_engine_update_fifo(item, item.addr + 200, 100));
  WELL(uccl_engine_write(self, mr_there, there.data(), 100, item, &id));
  WELL(ended(self, id));
  CHECK(there[199] == 'a' && there[200] == 'b' && there[299] == 'b' && there[300] == 'a');
  uccl_engine_conn_destroy(self);
  uccl_engine_conn_destroy(other);
}

int main() {
  alarm(120);
  setenv("UCCL_P2P_BIND", "127.0.0.1", 1);
  {
    Pair p;
    WELL(uccl_engine_reg(p.a, reinterpret_cast<uintptr_t>(here.data()), kSize, mr_here));
    WELL(uccl_engine_reg(p.b, reinterpret_cast<uintptr_t>(there.data()), kSize, mr_there));
    CHECK(mr_here != 0 && mr_there != 0);
    FifoItem const whole = whole_of(p);
    one_piece(p, whole);
    vectors(p, whole);
    ipc_info(p, whole);
    two_sided(p);
    notifications(p);
    with_itself(p);
    uccl_engine_mr_destroy(p.a, mr_here);
    uccl_engine_stop_accept(p.b);
  }
  std::puts("every call did what it says");
  return 0;
}
