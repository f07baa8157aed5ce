// The parts of UCCL's header that plugins rely on: its includes, its types, its defaults. Nothing
// else is included here, for that would hide a missing part.
#include <uccl_engine.h>
#include <common.h>

// A separate macro: engine.h has one too, but includes more.
#define CHECK(condition)                                    \
  do {                                                      \
    if (!(condition)) throw std::runtime_error(#condition); \
  } while (0)

// Finds the port in the metadata of a peer's engine, as a plugin does.
static int port_of(uccl_engine_t* engine) {
  char* metadata = nullptr;
  CHECK(uccl_engine_get_metadata(engine, &metadata) == 0);
  char const* colon = strrchr(metadata, ':');
  CHECK(colon && strstr(metadata, "127.0.0.1") == metadata);
  int const port = std::stoi(colon + 1);
  delete[] metadata;
  return port;
}

static std::vector<notify_msg_v_t> take(size_t count) {
  std::vector<notify_msg_v_t> all;
  while (all.size() < count) {
    std::vector<notify_msg_v_t> const some = uccl_engine_get_notifs_v();
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

// Strings that a std::string keeps within itself, that are just too long for that, and long ones.
static void notifications_of_any_length(uccl_conn_t* conn) {
  size_t const lengths[] = {0, 1, 14, 15, 16, 17, 255, 256, 4096, 1 << 20};
  std::vector<notify_msg_v_t> sent;
  for (size_t name : lengths) {
    for (size_t msg : lengths) {
      notify_msg_v_t one;
      one.name = std::string(name, 'n');
      one.msg = std::string(msg, '\0');
      for (size_t i = 0; i < msg; i++) one.msg[i] = static_cast<char>(i * 7);
      CHECK(uccl_engine_send_notif_v(conn, &one) == 0);
      sent.push_back(one);
      // A received notification belongs to the program: it is changed, moved and freed as any
      // string.
      std::vector<notify_msg_v_t> got = take(1);
      CHECK(got.size() == 1 && got[0].name == one.name && got[0].msg == one.msg);
      got[0].msg += "and more than there is room for";
      notify_msg_v_t const moved = std::move(got[0]);
      CHECK(moved.msg.size() == msg + 31 && moved.name.c_str()[name] == '\0');
    }
  }
  for (notify_msg_v_t const& one : sent) CHECK(uccl_engine_send_notif_v(conn, &one) == 0);
  std::vector<notify_msg_v_t> const got = take(sent.size());
  CHECK(got.size() == sent.size());
  for (size_t i = 0; i < got.size(); i++) CHECK(got[i].name == sent[i].name && got[i].msg == sent[i].msg);
  CHECK(uccl_engine_get_notifs_v().empty());
}

// Keeps a notification in the metadata of a request, as a plugin does.
static void notification_of_fixed_length(uccl_conn_t* conn) {
  md_t md;
  memset(&md, 0, sizeof md);
  strncpy(md.notify_data.name, "agent", sizeof md.notify_data.name - 1);
  memcpy(md.notify_data.msg, "done\0\1", 6);
  CHECK(uccl_engine_send_notif(conn, &md.notify_data) == 0);
  std::vector<notify_msg_t> all;
  while (all.empty()) all = uccl_engine_get_notifs();
  CHECK(all.size() == 1 && memcmp(&all[0], &md.notify_data, sizeof md.notify_data) == 0);
  // Sent with one call and taken with the other.
  CHECK(uccl_engine_send_notif(conn, &md.notify_data) == 0);
  std::vector<notify_msg_v_t> const same = take(1);
  CHECK(same[0].name == "agent" && same[0].msg == std::string("done\0\1", 6));
}

static void refusals(uccl_conn_t* conn) {
  notify_msg_v_t const one = {"a", "b"};
  CHECK(uccl_engine_send_notif_v(nullptr, &one) < 0);
  CHECK(uccl_engine_send_notif_v(conn, nullptr) < 0);
  CHECK(strstr(uccl_engine_last_error(), "NULL"));
}

extern "C" int setenv(char const*, char const*, int) noexcept;
extern "C" int puts(char const*);

int main() {
  setenv("UCCL_P2P_BIND", "127.0.0.1", 1);
  uccl_engine_t *a = uccl_engine_create(1, false), *b = uccl_engine_create(1, false);
  CHECK(a && b);
  uccl_conn_t* conn = uccl_engine_connect(a, "127.0.0.1", "0", port_of(b));
  CHECK(conn);
  notifications_of_any_length(conn);
  notification_of_fixed_length(conn);
  refusals(conn);
  CHECK(uccl_engine_conn_destroy(conn) == 0);
  CHECK(uccl_engine_destroy(a) == 0 && uccl_engine_destroy(b) == 0);
  puts("what plugins rely on is there");
}
