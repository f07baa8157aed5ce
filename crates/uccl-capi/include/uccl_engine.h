/* The interface of UCCL's engine library, as libuccl_p2p.so offers it.
 *
 * Programs and plugins that were written for UCCL's header compile with this one, and those that were
 * compiled with UCCL's header run with this library. This header needs the C++ standard library and nothing
 * else, neither verbs nor CUDA. Link with -luccl_p2p. C programs, and programs that want typed errors,
 * deadlines or to cancel, use uccl.h.
 *
 * All functions may be called from any thread. Those that return int return 0, or a negative number (one
 * of uccl_status_t in uccl.h) when they refuse or fail; uccl_engine_last_error() then returns the reason.
 * NULL is refused, and so is an engine or a connection that has been destroyed: engines and connections are
 * handles, not addresses. The settings UCCL_P2P_TIMEOUT_MS (connecting, silent peers) and
 * UCCL_P2P_TRANSFER_TIMEOUT_MS (transfers) bound every wait except uccl_engine_accept.
 *
 * Vectors and strings are those of libstdc++. */
#ifndef UCCL_ENGINE_H
#define UCCL_ENGINE_H

#include "common.h"

/* Bytes of each half of a notify_msg_t. */
#define MSG_SIZE 256
/* Bytes of a FifoItem as it travels. */
#define FIFO_SIZE 64
/* Bytes of the IPC info that uccl_engine_get_ipc_info writes. */
#define IPC_INFO_SIZE 128

typedef struct uccl_engine uccl_engine_t;
typedef struct uccl_conn uccl_conn_t;
/* Names registered memory. Never 0. */
typedef uint64_t uccl_mr_t;

/* A notification: the sender's name for itself, and its message. Neither needs a NUL at its end; zeros at
 * the end are not sent, and arrive as zeros. */
typedef struct notify_msg {
  char name[MSG_SIZE];
  char msg[MSG_SIZE];
} notify_msg_t;

/* A notification with halves of any length. */
struct notify_msg_v {
  std::string name;
  std::string msg;
};
typedef struct notify_msg_v notify_msg_v_t;

/* For programs that keep a notification as a part of a larger struct. */
typedef struct md {
  notify_msg_t notify_data;
} md_t;

/* The key with which a peer reads and writes a range of registered memory. addr and size may be changed to
 * name a part of the range, as uccl_engine_update_fifo does; the memory's owner checks them. The other fields
 * must not be changed. */
struct FifoItem {
  uint64_t addr;
  uint32_t size; /* 0xffffffff: that or more; the whole length is in the padding. */
  uint32_t rkey;
  uint32_t nmsgs;
  uint32_t rid;
  uint64_t idx;
  char padding[32];
};

static_assert(sizeof(FifoItem) == FIFO_SIZE, "a FifoItem travels as it is");
static_assert(sizeof(notify_msg_t) == 2 * MSG_SIZE, "a notify_msg_t has two halves");

/* ---- Engines ---- */

/* Makes an engine, which listens from now on. num_cpus is the most threads it may use; 0 or less leaves it
 * to the settings. in_python is taken and not needed. NULL if it fails. */
uccl_engine_t* uccl_engine_create(int num_cpus, bool in_python);

/* Ends an engine, its connections (which need not be destroyed first, and may be afterwards) and its memory's
 * registrations. Calls that wait in other threads return. */
int uccl_engine_destroy(uccl_engine_t* engine);

/* Writes the address of the engine: "ip:port?gpu" or "[ip6]:port?gpu", with the PCI address of the GPU or, where
 * there is none, its index. The caller frees it with delete[]. */
int uccl_engine_get_metadata(uccl_engine_t* engine, char** metadata);

/* ---- Connections ---- */

/* Connects to the engine at ip_addr (an IP, with or without brackets, or a name) and remote_port. Without a
 * port (0 or less) it takes the well-known port of the GPU that remote_gpu_bdf names by its index, and waits
 * for an engine that does not listen yet. With a port, remote_gpu_bdf may be NULL: the two engines find out
 * the GPU, and whether the peer is this process. same_process is ignored. A connection carries data both
 * ways. Returns NULL if no engine answers within UCCL_P2P_TIMEOUT_MS. */
uccl_conn_t* uccl_engine_connect(uccl_engine_t* engine, char const* ip_addr, char const* remote_gpu_bdf,
                                 int remote_port, bool same_process = false);

/* Waits for a peer that connects, and writes its IP and the index of its GPU. INET6_ADDRSTRLEN (46) bytes
 * have room for every IP; if the IP does not fit, the connection is closed. NULL when uccl_engine_stop_accept or
 * uccl_engine_destroy is called meanwhile or was before. */
uccl_conn_t* uccl_engine_accept(uccl_engine_t* engine, char* ip_addr_buf, size_t ip_addr_buf_len, int* remote_gpu_idx);

/* Makes uccl_engine_accept return NULL, now and from now on. */
int uccl_engine_stop_accept(uccl_engine_t* engine);

/* Notifications need no listener: these two only report whether there is such a connection. */
int uccl_engine_start_listener(uccl_conn_t* conn);
int uccl_engine_stop_listener(uccl_conn_t* conn);

/* Whether the peer is on this host. */
bool uccl_engine_conn_is_local(uccl_conn_t* conn);

/* Closes a connection. Its unfinished transfers fail. */
int uccl_engine_conn_destroy(uccl_conn_t* conn);

/* ---- Memory ---- */

/* Registers memory of the host or of a GPU, which must stay allocated until it is deregistered. */
int uccl_engine_reg(uccl_engine_t* engine, uintptr_t data, size_t size, uccl_mr_t& mr_id);

/* Deregisters memory: when this has returned 0, no peer's access lands in it any more. Memory that
 * unfinished transfers of this engine use is refused. */
int uccl_engine_mr_destroy(uccl_engine_t* engine, uccl_mr_t mr);

/* Writes the FifoItem of a range of registered memory, FIFO_SIZE bytes that are to be sent to the peer as
 * they are. */
int uccl_engine_prepare_fifo(uccl_engine_t* engine, uccl_mr_t mr, void const* data, size_t size, char* fifo_buf);

/* Narrows an item to a part: size bytes at the peer's address remote_addr. */
int uccl_engine_update_fifo(FifoItem& fifo_item, uint64_t remote_addr, uint32_t size);

void serialize_fifo_item(FifoItem const& item, char* buf);
void deserialize_fifo_item(char const* buf, FifoItem* item);

/* Writes the IPC info with which a peer of this host reaches registered memory from addr on, IPC_INFO_SIZE
 * bytes. A FifoItem does the same, for GPU memory as well, so programs do not need this call. */
int uccl_engine_get_ipc_info(uccl_engine_t* engine, uintptr_t addr, char* ipc_buf, bool* has_ipc);

/* Narrows IPC info to a part: size bytes at addr, where base_addr is the address that it was made for. */
int uccl_engine_update_ipc_info(char* ipc_buf, uintptr_t addr, uintptr_t base_addr, size_t size);

/* ---- Transfers ---- */

/* Each returns at once; uccl_engine_xfer_status reports the end of the transfer. mr is the local region that
 * contains data. */

int uccl_engine_read(uccl_conn_t* conn, uccl_mr_t mr, void const* data, size_t size, FifoItem fifo_item,
                     uint64_t* transfer_id);
int uccl_engine_write(uccl_conn_t* conn, uccl_mr_t mr, void const* data, size_t size, FifoItem fifo_item,
                      uint64_t* transfer_id);

/* num_iovs pieces as one transfer. ipc_bufs may be empty, or have NULLs; on a connection within this host
 * the IPC info of a piece is used instead of its FifoItem. */
int uccl_engine_read_vector(uccl_conn_t* conn, std::vector<uccl_mr_t> mr_ids, std::vector<void*> dst_v,
                            std::vector<size_t> size_v, std::vector<FifoItem> fifo_items, int num_iovs,
                            uint64_t* transfer_id, std::vector<char*> ipc_bufs = {});
int uccl_engine_write_vector(uccl_conn_t* conn, std::vector<uccl_mr_t> mr_ids, std::vector<void*> src_v,
                             std::vector<size_t> size_v, std::vector<FifoItem> fifo_items, int num_iovs,
                             uint64_t* transfer_id, std::vector<char*> ipc_bufs = {});

/* Two-sided: sends meet the peer's receives in order, and each has as many pieces as its receive. */
int uccl_engine_send(uccl_conn_t* conn, uccl_mr_t mr, void const* data, size_t size, uint64_t* transfer_id);
int uccl_engine_send_vector(uccl_conn_t* conn, std::vector<uccl_mr_t> mr_ids, std::vector<void const*> src_v,
                            std::vector<size_t> size_v, int num_iovs, uint64_t* transfer_id);

/* Waits for the peer's matching send, which may be shorter. A longer send fails on both sides. (UCCL
 * has no uccl_engine_recv_vector.) */
int uccl_engine_recv(uccl_conn_t* conn, uccl_mr_t mr, void* data, size_t data_size);
int uccl_engine_recv_vector(uccl_conn_t* conn, std::vector<uccl_mr_t> mr_ids, std::vector<void*> dst_v,
                            std::vector<size_t> size_v, int num_iovs);

/* Whether a transfer has ended, with success or failure. Also true for an unknown transfer, so that no
 * program polls for ever. */
bool uccl_engine_xfer_status(uccl_conn_t* conn, uint64_t transfer_id);

/* The result of a transfer: 0 if it succeeded, 1 if it has not ended, or a negative uccl_status_t. (UCCL has
 * no such call.) */
int uccl_engine_xfer_error(uccl_conn_t* conn, uint64_t transfer_id);

/* The reason of this thread's last failure, of a call or of a transfer that uccl_engine_xfer_status or
 * uccl_engine_xfer_error has reported. Never NULL; valid until the next failure on this thread. (UCCL has no
 * such call.) */
char const* uccl_engine_last_error();

/* ---- Notifications ---- */

/* Takes the notifications that have arrived over the connections of all engines of this process. Those with
 * a half longer than MSG_SIZE are left for uccl_engine_get_notifs_v; the last 1,024 of them are kept. */
std::vector<notify_msg_t> uccl_engine_get_notifs();

/* Starts to send a notification; it arrives unless the connection is lost. */
int uccl_engine_send_notif(uccl_conn_t* conn, notify_msg_t* notify_msg);

/* The same for halves of any length, together at most 64 MiB. */
#if !defined(_GLIBCXX_USE_CXX11_ABI) || _GLIBCXX_USE_CXX11_ABI
std::vector<notify_msg_v_t> uccl_engine_get_notifs_v();
int uccl_engine_send_notif_v(uccl_conn_t* conn, notify_msg_v_t const* notify_msg);
#endif

/* The same for programs with other strings. take is called for each notification, and must not throw. (UCCL
 * has no such calls.) */
typedef void (*uccl_engine_take_t)(void* context, char const* name, size_t name_len, char const* msg, size_t msg_len);
int uccl_engine_take_notifs(uccl_engine_take_t take, void* context);
int uccl_engine_send_named(uccl_conn_t* conn, char const* name, size_t name_len, char const* msg, size_t msg_len);

/* Strings from before GCC 5 (_GLIBCXX_USE_CXX11_ABI=0) have another layout than the library's. */
#if defined(_GLIBCXX_USE_CXX11_ABI) && !_GLIBCXX_USE_CXX11_ABI
inline std::vector<notify_msg_v_t> uccl_engine_get_notifs_v() {
  std::vector<notify_msg_v_t> all;
  uccl_engine_take_notifs(
      [](void* to, char const* name, size_t name_len, char const* msg, size_t msg_len) {
        notify_msg_v_t const one = {std::string(name, name_len), std::string(msg, msg_len)};
        static_cast<std::vector<notify_msg_v_t>*>(to)->push_back(one);
      },
      &all);
  return all;
}

inline int uccl_engine_send_notif_v(uccl_conn_t* conn, notify_msg_v_t const* notify_msg) {
  if (!notify_msg) return uccl_engine_send_named(nullptr, nullptr, 0, nullptr, 0);
  std::string const &name = notify_msg->name, &msg = notify_msg->msg;
  return uccl_engine_send_named(conn, name.data(), name.size(), msg.data(), msg.size());
}
#endif

#endif
