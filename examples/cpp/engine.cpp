// A program for the interface of UCCL's engine library: two engines, vectors both ways, notifications, send and recv.
//
//     c++ -std=c++17 engine.cpp $(pkg-config --cflags --libs uccl) -pthread -o engine && ./engine
#include <uccl_engine.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>

namespace {

void must(bool well, char const* what) {
  if (!well) {
    std::fprintf(stderr, "%s: %s\n", what, uccl_engine_last_error());
    std::exit(1);
  }
}

// Polls until the transfer has ended, and checks that it ended well.
void finish(uccl_conn_t* conn, uint64_t transfer, char const* what) {
  while (!uccl_engine_xfer_status(conn, transfer)) {
    std::this_thread::yield();
  }
  must(uccl_engine_xfer_error(conn, transfer) == 0, what);
}

// Memory that is registered as long as this object lives.
struct Buffer {
  uccl_engine_t* engine;
  std::vector<char> bytes;
  uccl_mr_t mr = 0;

  Buffer(uccl_engine_t* engine, size_t size, char fill) : engine(engine), bytes(size, fill) {
    must(uccl_engine_reg(engine, reinterpret_cast<uintptr_t>(bytes.data()), size, mr) == 0, "reg");
  }
  Buffer(Buffer const&) = delete;
  ~Buffer() { uccl_engine_mr_destroy(engine, mr); }
};

struct Peer {
  std::string ip;
  int port;
  std::string gpu;
};

// "ip:port?gpu", "[ip6]:port?gpu"
Peer parse(std::string const& metadata) {
  auto const question = metadata.find('?');
  auto const colon = metadata.rfind(':', question);
  return {metadata.substr(0, colon), std::stoi(metadata.substr(colon + 1, question - colon - 1)),
          metadata.substr(question + 1)};
}

std::string metadata_of(uccl_engine_t* engine) {
  char* text = nullptr;
  must(uccl_engine_get_metadata(engine, &text) == 0, "get_metadata");
  std::unique_ptr<char[]> owned(text);
  return owned.get();
}

}  // namespace

int main() {
  setenv("UCCL_P2P_BIND", "127.0.0.1", 1);
  uccl_engine_t* here = uccl_engine_create(1, false);
  uccl_engine_t* there = uccl_engine_create(1, false);
  must(here && there, "create");

  uccl_conn_t* from_here = nullptr;
  std::thread acceptor([&] {
    char ip[64];
    int gpu = -1;
    from_here = uccl_engine_accept(there, ip, sizeof ip, &gpu);
    must(from_here, "accept");
    std::printf("accepted %s, GPU %d\n", ip, gpu);
  });
  Peer const peer = parse(metadata_of(there));
  uccl_conn_t* to_there = uccl_engine_connect(here, peer.ip.c_str(), peer.gpu.c_str(), peer.port, false);
  must(to_there, "connect");
  acceptor.join();

  {
    constexpr size_t kPieces = 64, kPiece = 4096;
    Buffer source(here, kPieces * kPiece, 'a'), target(there, 2 * kPieces * kPiece, '-'),
        back(here, kPieces * kPiece, '?');

    // The advert that the memory's owner sends: 64 bytes.
    char fifo[FIFO_SIZE];
    must(uccl_engine_prepare_fifo(there, target.mr, target.bytes.data(), target.bytes.size(), fifo) == 0,
         "prepare_fifo");
    FifoItem whole;
    deserialize_fifo_item(fifo, &whole);

    // Every second piece of the target.
    std::vector<uccl_mr_t> mrs(kPieces, source.mr), mrs_back(kPieces, back.mr);
    std::vector<void*> from, to;
    std::vector<size_t> const sizes(kPieces, kPiece);
    std::vector<FifoItem> items;
    for (size_t i = 0; i < kPieces; i++) {
      from.push_back(source.bytes.data() + i * kPiece);
      to.push_back(back.bytes.data() + i * kPiece);
      items.push_back(whole);
      must(uccl_engine_update_fifo(items[i], whole.addr + 2 * i * kPiece, kPiece) == 0, "update_fifo");
    }
    uint64_t transfer = 0;
    must(uccl_engine_write_vector(to_there, mrs, from, sizes, items, kPieces, &transfer, {}) == 0, "write_vector");
    finish(to_there, transfer, "write_vector");
    must(uccl_engine_read_vector(to_there, mrs_back, to, sizes, items, kPieces, &transfer, {}) == 0, "read_vector");
    finish(to_there, transfer, "read_vector");
    for (size_t i = 0; i < 2 * kPieces; i++) {
      must(target.bytes[i * kPiece] == (i % 2 ? '-' : 'a'), "the target has something else");
    }
    must(back.bytes == source.bytes, "something else was read");
    std::printf("wrote and read %zu pieces\n", kPieces);

    // A send meets a receive, which may be longer.
    std::thread receiver(
        [&] { must(uccl_engine_recv(from_here, target.mr, target.bytes.data(), target.bytes.size()) == 0, "recv"); });
    must(uccl_engine_send(to_there, source.mr, source.bytes.data(), source.bytes.size(), &transfer) == 0, "send");
    finish(to_there, transfer, "send");
    receiver.join();
    must(std::memcmp(target.bytes.data(), source.bytes.data(), source.bytes.size()) == 0,
         "something else was received");
    std::printf("sent and received %zu bytes\n", source.bytes.size());
  }

  // Notifications of fixed length, as UCCL has them, and of any length.
  notify_msg_t note = {};
  std::snprintf(note.name, sizeof note.name, "here");
  std::snprintf(note.msg, sizeof note.msg, "short");
  must(uccl_engine_send_notif(to_there, &note) == 0, "send_notif");
  notify_msg_v_t const longer = {"here", std::string(100000, 'x')};
  must(uccl_engine_send_notif_v(to_there, &longer) == 0, "send_notif_v");
  for (size_t got = 0; got < 2; std::this_thread::yield()) {
    for (auto const& n : uccl_engine_get_notifs()) {
      std::printf("%s says %s\n", n.name, n.msg);
      got++;
    }
    for (auto const& n : uccl_engine_get_notifs_v()) {
      std::printf("%s says %zu bytes\n", n.name.c_str(), n.msg.size());
      got++;
    }
  }

  uccl_engine_conn_destroy(to_there);
  uccl_engine_conn_destroy(from_here);
  uccl_engine_destroy(here);
  uccl_engine_destroy(there);
  return 0;
}
