// The functions of src/ffi.rs that plugin.cpp calls.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

struct uccl_nixl_agent;
struct uccl_nixl_memory;
struct uccl_nixl_transfer;

// Bytes of the caller, for the length of the call.
struct uccl_nixl_bytes {
    const char *data;
    std::size_t len;
};

struct uccl_nixl_param {
    uccl_nixl_bytes name, value;
};

// Takes bytes over; called before the function that it was given to returns.
using uccl_nixl_take = void (*)(void *to, uccl_nixl_bytes);
using uccl_nixl_take_pair = void (*)(void *to, uccl_nixl_bytes, uccl_nixl_bytes);

struct uccl_nixl_descs {
    const void *descs; // nixlMetaDesc
    std::size_t len;
};

struct uccl_nixl_estimate {
    std::int64_t duration_us, error_us;
};

void uccl_nixl_options(void *to, uccl_nixl_take_pair);

int uccl_nixl_create(uccl_nixl_bytes agent, bool instead_of_ucx, const uccl_nixl_param *, std::size_t,
                     uccl_nixl_agent **);
void uccl_nixl_refuse_view();
void uccl_nixl_destroy(uccl_nixl_agent *);

int uccl_nixl_conn_info(const uccl_nixl_agent *, bool instead_of_ucx, void *to, uccl_nixl_take);
int uccl_nixl_load_conn_info(const uccl_nixl_agent *, uccl_nixl_bytes remote, uccl_nixl_bytes info);
int uccl_nixl_connect(const uccl_nixl_agent *, uccl_nixl_bytes remote);
int uccl_nixl_disconnect(const uccl_nixl_agent *, uccl_nixl_bytes remote);

int uccl_nixl_register(const uccl_nixl_agent *, std::uintptr_t addr, std::size_t len, bool vram, uccl_nixl_memory **);
int uccl_nixl_deregister(const uccl_nixl_agent *, const uccl_nixl_memory *, bool *was_last);
std::uint64_t uccl_nixl_region_number(const uccl_nixl_memory *);
int uccl_nixl_public_data(const uccl_nixl_memory *, void *to, uccl_nixl_take);
int uccl_nixl_load_memory(std::uintptr_t addr, std::size_t len, uccl_nixl_bytes data, uccl_nixl_memory **);
uccl_nixl_memory *uccl_nixl_share_memory(const uccl_nixl_memory *);
void uccl_nixl_unload_memory(uccl_nixl_memory *);
int uccl_nixl_query(const uccl_nixl_agent *, std::uintptr_t addr, std::size_t len, void *to, uccl_nixl_take_pair);

int uccl_nixl_prepare(const uccl_nixl_agent *, bool write, uccl_nixl_descs local, uccl_nixl_descs remote,
                      uccl_nixl_bytes agent, uccl_nixl_transfer **);
int uccl_nixl_post(const uccl_nixl_agent *, const uccl_nixl_transfer *, const uccl_nixl_bytes *notif);
int uccl_nixl_check(const uccl_nixl_transfer *);
int uccl_nixl_cancel(const uccl_nixl_transfer *);
void uccl_nixl_release(uccl_nixl_transfer *);
uccl_nixl_estimate uccl_nixl_cost(const uccl_nixl_transfer *);

int uccl_nixl_take_notifs(const uccl_nixl_agent *, void *to, uccl_nixl_take_pair);
int uccl_nixl_notify(const uccl_nixl_agent *, uccl_nixl_bytes remote, uccl_nixl_bytes message);
}
