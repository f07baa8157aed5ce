/* uccl: tensors between processes and hosts, for C and C++.
 *
 * Made by `cargo xtask headers` from crates/uccl-capi/src/api; do not edit it.
 *
 * All functions may be called from any thread, and none throws. Those that return uccl_status_t return UCCL_OK or the kind
 * of a failure; uccl_last_error then returns this thread's message. Results are written only if UCCL_OK is returned.
 *
 * - Pointers to results and to arguments must not be NULL unless their function says so, and must be valid until it
 *   returns. NULL is refused; the validity of a pointer cannot be checked.
 * - Endpoints, configs and prepared transfers are handles, not addresses: a destroyed one is refused as UCCL_UNKNOWN_ID.
 *   Their creator destroys them, once.
 * - Connections, regions and transfers are numbers of the endpoint that gave them. They are never used twice.
 * - Times are in milliseconds, lengths in bytes. Texts are UTF-8 and end with a NUL. */

#ifndef UCCL_H
#define UCCL_H

#include <stddef.h>
#include <stdint.h>

// The endpoint's time: its setting timeout_ms to connect, transfer_timeout_ms for all else. For a
// call that only waits for something to happen (`uccl_wait`, `uccl_take_notifs`) it is no limit.
#define UCCL_TIMEOUT_DEFAULT -1

// No limit.
#define UCCL_TIMEOUT_NEVER -2

// Bytes that have room for every address, with its NUL.
#define UCCL_ADDRESS_SIZE 128

// The result of a call. Failures are negative; `uccl_last_error` has a text about them.
enum uccl_status_t
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // Done.
  UCCL_OK = 0,
  // The transfer or the connect is under way. No failure.
  UCCL_IN_PROGRESS = 1,
  // An argument or a setting makes no sense: a NULL pointer, a list of the wrong length, a bad
  // value.
  UCCL_INVALID_ARGUMENT = -1,
  // No such endpoint, connection, region or transfer: never made, or gone.
  UCCL_UNKNOWN_ID = -2,
  // A piece is not inside the region that was named for it, or is longer than its advert.
  UCCL_OUT_OF_RANGE = -3,
  // The peer refused the access, or the advert is not from this peer: revoked, forged or
  // outdated.
  UCCL_REFUSED = -4,
  // The message is longer than the receive that met it. Nothing was written past the receive's
  // end.
  UCCL_TRUNCATED = -5,
  // Cancelled, here or by the peer. No byte of it lands any more, at the peer unless its
  // connection was lost over it.
  UCCL_CANCELLED = -6,
  // The time was up. No byte of the transfer lands any more, at the peer unless its connection
  // was lost over it.
  UCCL_DEADLINE = -7,
  // The connection could not be made: no endpoint listens there, or the peer refuses it.
  UCCL_CONNECT_FAILED = -8,
  // The peer is gone or silent, or the connection was closed here.
  UCCL_CONNECTION_LOST = -9,
  // The peer sent invalid data or speaks another version, or a checksum does not match.
  UCCL_PROTOCOL = -10,
  // Too much is outstanding: wait for earlier transfers, then try again.
  UCCL_FULL = -11,
  // The endpoint has been destroyed meanwhile, or belongs to the process that this one was
  // forked from.
  UCCL_CLOSED = -12,
  // The operating system refused something: an address, a socket, memory.
  UCCL_SYSTEM = -13,
  // A GPU could not move the data, or cannot be reached on the path to this peer.
  UCCL_GPU = -14,
  // A network device could not move the data.
  UCCL_DEVICE = -16,
  // Memory cannot be given back yet: an access to it may still be under way. It has to stay
  // allocated; the same call waits again.
  UCCL_STILL_TOUCHED = -17,
  // A fault of this library. Please report it, with the text of `uccl_last_error`.
  UCCL_INTERNAL = -15,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum uccl_status_t uccl_status_t;
#else
typedef int32_t uccl_status_t;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// The change that a signal makes to a word.
enum uccl_change_t
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // The word becomes the value.
  UCCL_SET = 0,
  // The value is added to the word, which wraps around.
  UCCL_ADD = 1,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum uccl_change_t uccl_change_t;
#else
typedef int32_t uccl_change_t;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// The kind of a transfer.
enum uccl_op_t
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // From the peer's advertised memory into ours.
  UCCL_READ = 0,
  // From ours into the peer's advertised memory.
  UCCL_WRITE = 1,
  // From ours to the peer's matching receive.
  UCCL_SEND = 2,
  // From the peer's matching send into ours.
  UCCL_RECV = 3,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum uccl_op_t uccl_op_t;
#else
typedef int32_t uccl_op_t;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// The settings of an endpoint that is to be made.
typedef struct uccl_config_t uccl_config_t;

// A connect that was begun by `uccl_connect_begin`.
typedef struct uccl_connect_t uccl_connect_t;

// One process's engine for one GPU (or none): it listens, connects, registers memory and moves
// data.
typedef struct uccl_endpoint_t uccl_endpoint_t;

// A read or a write that was checked once, for any number of posts.
typedef struct uccl_prepared_t uccl_prepared_t;

// Counters of an endpoint since it was made.
typedef struct uccl_stats_t {
  // Open connections.
  uint64_t connections;
  // Registered regions.
  uint64_t regions;
  // Transfers posted here.
  uint64_t transfers_posted;
  // Transfers that ended well.
  uint64_t transfers_done;
  // Transfers that failed.
  uint64_t transfers_failed;
  // Bytes that this endpoint's transfers sent.
  uint64_t bytes_sent;
  // Bytes that this endpoint's transfers received.
  uint64_t bytes_received;
  // Notifications sent.
  uint64_t notifs_sent;
  // Notifications received.
  uint64_t notifs_received;
  // Accesses by peers that were refused.
  uint64_t refused_accesses;
} uccl_stats_t;

// A connection that was accepted.
typedef struct uccl_accepted_t {
  // The connection.
  uint64_t conn;
  // The peer's GPU.
  uint32_t gpu_index;
  // The IP that the peer connected from.
  char ip[48];
} uccl_accepted_t;

// The key with which a peer reads and writes a range of a region: 64 bytes, to be sent to the peer
// unchanged, by any means.
typedef struct uccl_advert_t {
  // The bytes.
  uint8_t bytes[64];
} uccl_advert_t;

// A piece of local memory.
typedef struct uccl_iov_t {
  // The region that it lies in.
  uint64_t mr;
  // Where it starts.
  void *ptr;
  // How long it is, in bytes.
  size_t len;
} uccl_iov_t;

// A word of the peer's memory that a write changes, once, when all its bytes are visible there. It
// does not change when the write fails or is cancelled. The word is an integer of eight bytes,
// aligned to eight.
typedef struct uccl_signal_t {
  // The advert of the word, which begins at the advert's first byte.
  struct uccl_advert_t word;
  // The value that the word becomes, or that is added to it.
  uint64_t value;
  // One of uccl_change_t.
  int32_t change;
  // Not 0: the word changes only after all earlier writes of the request's context have
  // succeeded, too. Once one of these has failed, the context's strong signals fail.
  int32_t strong;
} uccl_signal_t;

// A transfer: any number of pieces moved as one. Set the whole struct to zero first, then the
// needed fields, and `timeout_ms`.
typedef struct uccl_request_t {
  // The connection.
  uint64_t conn;
  // One of uccl_op_t.
  int32_t op;
  // Pieces of local memory.
  const struct uccl_iov_t *iovs;
  // The peer's memory, one advert a piece, each at least as long; NULL for UCCL_SEND and
  // UCCL_RECV.
  const struct uccl_advert_t *adverts;
  // How many pieces there are, 1 to 65,536; with a signal there may be none.
  size_t count;
  // A notification that the peer gets when the data has arrived, or NULL. Not with UCCL_RECV.
  const void *notif;
  // Its length in bytes, at most 64 MiB.
  size_t notif_len;
  // Milliseconds until the transfer fails: UCCL_TIMEOUT_DEFAULT, UCCL_TIMEOUT_NEVER or a
  // positive number.
  int64_t timeout_ms;
  // A word of the peer's that changes when a write's bytes have arrived, before the notification
  // goes out, or NULL.
  const struct uccl_signal_t *signal;
  // The scope of strong signals: they follow the order in which transfers are posted in one
  // context.
  uint32_t context;
} uccl_request_t;

// A piece of memory on both sides, named by its addresses.
typedef struct uccl_address_piece_t {
  // Where it starts in this process, in registered memory.
  void *local;
  // Where it starts in the peer's process, in memory that the peer has published.
  uint64_t remote;
  // How long it is, in bytes.
  size_t len;
} uccl_address_piece_t;

// Takes a notification: the connection that it came over, and its bytes, which are valid until
// this returns. It must not throw or jump out.
typedef void (*uccl_notif_fn)(void *context, uint64_t conn, const void *data, size_t len);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// A status in two or three words. The text is constant.
const char *uccl_status_name(int32_t status);

// The reason of this thread's last failure, and the remedy; an empty text if no call has failed. A
// call that succeeds leaves it. The next failure on this thread overwrites it.
const char *uccl_last_error(void);

// The version of the library, such as "0.1.0".
const char *uccl_version(void);

// Makes settings: the defaults, changed by the environment variables UCCL_P2P_*.
uccl_status_t uccl_config_new(struct uccl_config_t **config);

// Changes a setting: `name` is the environment variable (UCCL_P2P_TIMEOUT_MS) or the part behind
// its prefix, in lower case (timeout_ms); docs/settings.md lists them. Beside those there are
// `gpu_index`, the GPU that the endpoint serves (0), and `port`, the port that it listens on (0
// for any; the base port plus the GPU's index if that is free).
uccl_status_t uccl_config_set(struct uccl_config_t *config, const char *name, const char *value);

// Ends settings. Endpoints that were made with them keep theirs.
uccl_status_t uccl_config_free(struct uccl_config_t *config);

// Makes an endpoint, which listens from now on. If `config` is NULL, it has the environment's
// settings.
uccl_status_t uccl_endpoint_create(const struct uccl_config_t *config, struct uccl_endpoint_t **endpoint);

// Ends an endpoint: its connections are closed, and unfinished work fails, in other threads' calls
// too. When this returns UCCL_OK, no peer's access lands in its memory any more.
// UCCL_STILL_TOUCHED means that a peer which is stuck in the middle of an access may still touch
// the regions that `uccl_last_error` names: their memory has to stay allocated, and the same call
// waits again.
uccl_status_t uccl_endpoint_destroy(struct uccl_endpoint_t *endpoint);

// Writes the address of this endpoint, such as "10.0.0.1:28100?0": IP, port and GPU. A peer passes
// it to `uccl_connect`; the program brings it there. UCCL_ADDRESS_SIZE bytes have room for it.
uccl_status_t uccl_endpoint_address(const struct uccl_endpoint_t *endpoint, char *text, size_t capacity);

// Reads the endpoint's counters.
uccl_status_t uccl_endpoint_stats(const struct uccl_endpoint_t *endpoint, struct uccl_stats_t *stats);

// Connects to the endpoint at `address`: the text that `uccl_endpoint_address` wrote there, or
// "host:port". A name's addresses are all tried, in their order, within the timeout. The
// connection works both ways.
uccl_status_t uccl_connect(const struct uccl_endpoint_t *endpoint,
                           const char *address,
                           int64_t timeout_ms,
                           uint64_t *conn);

// Begins to connect, and returns at once: `uccl_connect_poll` does the rest, and
// `uccl_connect_cancel` ends it. Neither this nor `uccl_connect_poll` blocks, and no thread is
// started for it. Any number may be under way at a time.
//
// The host in `address` is an IP; a name is refused, because looking it up may block. The timeout
// counts from here, and `uccl_connect_poll` sees its end.
uccl_status_t uccl_connect_begin(const struct uccl_endpoint_t *endpoint,
                                 const char *address,
                                 int64_t timeout_ms,
                                 struct uccl_connect_t **connect);

// Goes on with a connect as far as is possible now. UCCL_IN_PROGRESS: it is under way. UCCL_OK:
// `conn` has the connection. Anything else says why there is none. A result stays: later calls
// return it again, until `uccl_connect_cancel`.
uccl_status_t uccl_connect_poll(const struct uccl_connect_t *connect, uint64_t *conn);

// Ends a connect that is under way, and leaves nothing of it: no socket, no memory, no connection.
// Ends the handle in any case, so call this once for each connect that was begun. A connection
// that `uccl_connect_poll` has returned stays.
uccl_status_t uccl_connect_cancel(struct uccl_connect_t *connect);

// Waits for a peer that connects. A timeout of 0 takes a connection that has been made already, or
// else ends with UCCL_DEADLINE: this is the form that is polled, and does not block.
uccl_status_t uccl_accept(const struct uccl_endpoint_t *endpoint, int64_t timeout_ms, struct uccl_accepted_t *accepted);

// Closes a connection. Its unfinished transfers fail.
uccl_status_t uccl_disconnect(const struct uccl_endpoint_t *endpoint, uint64_t conn);

// Whether transfers can be posted on a connection; if not, `uccl_last_error` has the reason.
uccl_status_t uccl_check_connection(const struct uccl_endpoint_t *endpoint, uint64_t conn);

// Allocates memory that peers of this host can map, page aligned and zeroed: a transfer to or from
// it is one copy in user space, without a system call. It is registered and advertised as any
// other.
uccl_status_t uccl_alloc(const struct uccl_endpoint_t *endpoint, size_t len, void **ptr);

// Gives back memory of `uccl_alloc`, also after its endpoint's end. It is freed when no region
// lies in it any more.
uccl_status_t uccl_free(void *ptr);

// Registers memory of the host or of a GPU. It must stay allocated until `uccl_deregister` or
// `uccl_endpoint_destroy` has returned UCCL_OK: peers that have an advert read and write it at any
// time.
uccl_status_t uccl_register(const struct uccl_endpoint_t *endpoint, void *ptr, size_t len, uint64_t *mr);

// Ends a region, and all adverts of it: when this has returned UCCL_OK, no peer's access lands in
// it any more. A region that unfinished transfers of this endpoint use is refused.
// UCCL_STILL_TOUCHED means that a peer which is stuck in the middle of an access may still touch
// the memory, which has to stay allocated; the same call waits again.
uccl_status_t uccl_deregister(const struct uccl_endpoint_t *endpoint, uint64_t mr);

// Makes the advert of `len` bytes at `ptr`, which are inside the region. The advert holds the
// region's key: any peer that has it can reach the whole region. Memory that a peer must not reach
// belongs into another region; regions may overlap.
uccl_status_t uccl_advertise(const struct uccl_endpoint_t *endpoint,
                             uint64_t mr,
                             const void *ptr,
                             size_t len,
                             struct uccl_advert_t *advert);

// Makes the advert of a part of an advert: `len` bytes that begin `offset` bytes into it. Either
// side may do so; `advert` and `part` may be the same.
uccl_status_t uccl_advert_part(const struct uccl_advert_t *advert,
                               uint64_t offset,
                               uint64_t len,
                               struct uccl_advert_t *part);

// Writes how data moves over a connection: "direct", "staged" (through an intermediate buffer) or
// "tcp". Over RDMA and libfabric the answer is the slowest way among the regions that are
// registered here and those of the peer's that have been reached. 8 bytes have room for it.
uccl_status_t uccl_moves(const struct uccl_endpoint_t *endpoint, uint64_t conn, char *text, size_t capacity);

// Writes the name of the path that data takes to and from memory which the peer advertised: "cma",
// "shm", "mapped", "cuda_ipc" or "tcp", as docs/status.md explains. 16 bytes have room for it.
uccl_status_t uccl_path(const struct uccl_endpoint_t *endpoint,
                        uint64_t conn,
                        const struct uccl_advert_t *advert,
                        char *text,
                        size_t capacity);

// Writes `count` pieces into the peer's memory, `iovs[i]` to the memory of `adverts[i]`, and waits
// until they have arrived.
uccl_status_t uccl_write(const struct uccl_endpoint_t *endpoint,
                         uint64_t conn,
                         const struct uccl_iov_t *iovs,
                         const struct uccl_advert_t *adverts,
                         size_t count);

// Reads `count` pieces of the peer's memory, `adverts[i]` into `iovs[i]`, and waits until they
// have arrived.
uccl_status_t uccl_read(const struct uccl_endpoint_t *endpoint,
                        uint64_t conn,
                        const struct uccl_iov_t *iovs,
                        const struct uccl_advert_t *adverts,
                        size_t count);

// Sends `count` pieces as one message to the peer's matching receive, and waits until it has taken
// them. Sends and receives of a connection meet in order.
uccl_status_t uccl_send(const struct uccl_endpoint_t *endpoint,
                        uint64_t conn,
                        const struct uccl_iov_t *iovs,
                        size_t count);

// Receives one message into `count` pieces, as many as it was sent in, and waits for it.
// `received`, if not NULL, gets its length in bytes, which may be less than there is room for.
uccl_status_t uccl_recv(const struct uccl_endpoint_t *endpoint,
                        uint64_t conn,
                        const struct uccl_iov_t *iovs,
                        size_t count,
                        uint64_t *received);

// Makes a transfer and waits for its end. `bytes`, if not NULL, gets how much was moved.
uccl_status_t uccl_run(const struct uccl_endpoint_t *endpoint, const struct uccl_request_t *request, uint64_t *bytes);

// Starts a transfer. The caller may free the request and its lists when this has returned; the
// memory that is moved must stay until the transfer has ended.
uccl_status_t uccl_post(const struct uccl_endpoint_t *endpoint,
                        const struct uccl_request_t *request,
                        uint64_t *transfer);

// The state of a transfer: UCCL_IN_PROGRESS, UCCL_OK, or the status of its failure. The answer for
// a transfer that has ended stays the same; the last 16,384 are remembered. `bytes`, if not NULL,
// gets how much was moved.
uccl_status_t uccl_poll(const struct uccl_endpoint_t *endpoint, uint64_t transfer, uint64_t *bytes);

// Waits for a transfer's end, at most `timeout_ms`; after that the answer is UCCL_IN_PROGRESS, and
// the transfer continues. Otherwise as `uccl_poll`.
uccl_status_t uccl_wait(const struct uccl_endpoint_t *endpoint, uint64_t transfer, int64_t timeout_ms, uint64_t *bytes);

// Waits until the word of eight bytes at `ptr` in region `mr`, which peers' signals change, is
// `at_least` or more. The data that its signals announce has then arrived. `value`, if not NULL,
// gets the word's value. UCCL_DEADLINE if that takes longer than `timeout_ms`. The word is in host
// memory: let a stream or a kernel wait for a word in a GPU's memory.
uccl_status_t uccl_wait_signal(const struct uccl_endpoint_t *endpoint,
                               uint64_t mr,
                               const void *ptr,
                               uint64_t at_least,
                               int64_t timeout_ms,
                               uint64_t *value);

// As `uccl_wait_signal`, for a word that the peer of a connection changes. If the connection ends
// first, returns the reason of the end, such as UCCL_CONNECTION_LOST.
uccl_status_t uccl_wait_signal_from(const struct uccl_endpoint_t *endpoint,
                                    uint64_t conn,
                                    uint64_t mr,
                                    const void *ptr,
                                    uint64_t at_least,
                                    int64_t timeout_ms,
                                    uint64_t *value);

// Ends a transfer. When this returns, no byte of it lands on either side any more. The answer is
// UCCL_OK if it had succeeded before, else UCCL_CANCELLED or the status of its failure. A peer
// that does not confirm the end in time loses its connection; then this holds on this side at
// once, and on the peer's side once the peer notices.
uccl_status_t uccl_cancel(const struct uccl_endpoint_t *endpoint, uint64_t transfer);

// Checks a read or a write of `count` pieces, at most 1,048,576, `iovs[i]` from or to the memory
// of `adverts[i]`, for posts by `uccl_post_prepared`. `op` is UCCL_READ or UCCL_WRITE. No byte
// moves, and no connection is needed; all adverts are of one endpoint. It keeps no region:
// a post after one of them was deregistered is refused. The lists may be freed when this has
// returned.
uccl_status_t uccl_prepare(const struct uccl_endpoint_t *endpoint,
                           int32_t op,
                           const struct uccl_iov_t *iovs,
                           const struct uccl_advert_t *adverts,
                           size_t count,
                           struct uccl_prepared_t **prepared);

// Starts a prepared transfer over a connection to the endpoint of its adverts, as `uccl_post`
// starts a request, at a cost that does not depend on its number of pieces. It may be under way
// more than once. `notif` of `notif_len` bytes is for this post alone, or NULL. UCCL_UNKNOWN_ID:
// one of its regions has been deregistered since it was prepared.
uccl_status_t uccl_post_prepared(const struct uccl_endpoint_t *endpoint,
                                 uint64_t conn,
                                 const struct uccl_prepared_t *prepared,
                                 const void *notif,
                                 size_t notif_len,
                                 uint64_t *transfer);

// Ends the handle of a prepared transfer. Posts of it that are under way go on.
uccl_status_t uccl_prepared_free(struct uccl_prepared_t *prepared);

// Publishes a region: peers that are connected read and write it by its address, without an
// advert, until it is deregistered. The endpoint's setting "publish" has to be "1".
uccl_status_t uccl_publish(const struct uccl_endpoint_t *endpoint, uint64_t mr);

// The connection to the endpoint at `address`, made when it is first needed, and again when its
// peer has died. All threads that ask for the address get the same one. The address is as for
// `uccl_connect`.
uccl_status_t uccl_reach(const struct uccl_endpoint_t *endpoint,
                         const char *address,
                         int64_t timeout_ms,
                         uint64_t *conn);

// Writes `count` pieces into memory that the peer has published, and waits until they have
// arrived. A piece may span several regions. The peer's regions are looked up once and kept;
// regions that the peer has registered anew are looked up again. UCCL_REFUSED: memory of the
// peer's is not published.
uccl_status_t uccl_write_by_address(const struct uccl_endpoint_t *endpoint,
                                    uint64_t conn,
                                    const struct uccl_address_piece_t *pieces,
                                    size_t count,
                                    int64_t timeout_ms);

// Reads `count` pieces of memory that the peer has published, as `uccl_write_by_address` writes
// them.
uccl_status_t uccl_read_by_address(const struct uccl_endpoint_t *endpoint,
                                   uint64_t conn,
                                   const struct uccl_address_piece_t *pieces,
                                   size_t count,
                                   int64_t timeout_ms);

// Sends a message of at most 64 MiB to the peer, and waits until it has arrived.
uccl_status_t uccl_send_notif(const struct uccl_endpoint_t *endpoint,
                              uint64_t conn,
                              const void *data,
                              size_t len,
                              int64_t timeout_ms);

// As `uccl_send_notif`, but without waiting: `transfer` is for `uccl_poll`, `uccl_wait` and
// `uccl_cancel`. The caller may reuse the bytes when this has returned.
uccl_status_t uccl_post_notif(const struct uccl_endpoint_t *endpoint,
                              uint64_t conn,
                              const void *data,
                              size_t len,
                              int64_t timeout_ms,
                              uint64_t *transfer);

// Waits until notifications have arrived, at most `timeout_ms` (0 only looks), and hands each to
// `take`, in the order in which they came over their connection. `taken`, if not NULL, gets their
// number; 0 is no failure.
uccl_status_t uccl_take_notifs(const struct uccl_endpoint_t *endpoint,
                               int64_t timeout_ms,
                               uccl_notif_fn take,
                               void *context,
                               size_t *taken);

// As `uccl_take_notifs`, for a caller that waits for the peer of a connection. Once the connection
// has ended and all notifications have been taken, returns the reason of the end, such as
// UCCL_CONNECTION_LOST. `take` gets the notifications of all connections.
uccl_status_t uccl_take_notifs_from(const struct uccl_endpoint_t *endpoint,
                                    uint64_t conn,
                                    int64_t timeout_ms,
                                    uccl_notif_fn take,
                                    void *context,
                                    size_t *taken);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* UCCL_H */
