// NIXL's backend interface over the functions of src/ffi.rs. Nothing is decided here: C++ objects
// are taken apart for Rust, and made from Rust's results.
#include "nixl_abi.h"
#include "uccl_nixl.h"

#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace {

constexpr nixl_status_t in_progress = 1;
constexpr nixl_status_t success = 0;
constexpr nixl_status_t invalid_param = -2;
constexpr nixl_status_t backend_error = -3;
constexpr nixl_status_t not_supported = -9;

constexpr char plugin_name[] = "UCCL";
// The name under which NIXL creates a backend of this plugin where it stands in for UCX's.
constexpr char ucx_name[] = "UCX";

uccl_nixl_bytes bytes(const std::string &text) { return {text.data(), text.size()}; }

std::string text(uccl_nixl_bytes from) { return {from.data, from.len}; }

void assign(void *to, uccl_nixl_bytes from) noexcept { static_cast<std::string *>(to)->assign(from.data, from.len); }

void insert(void *to, uccl_nixl_bytes name, uccl_nixl_bytes value) noexcept {
    static_cast<nixl_b_params_t *>(to)->emplace(text(name), text(value));
}

void append(void *to, uccl_nixl_bytes agent, uccl_nixl_bytes message) noexcept {
    static_cast<notif_list_t *>(to)->emplace_back(text(agent), text(message));
}

// Registered memory of this agent, or memory of another that is known from its metadata.
class Memory final : public nixlBackendMD {
  public:
    uccl_nixl_memory *const memory;

    explicit Memory(uccl_nixl_memory *of) : nixlBackendMD(true), memory(of) {}
    ~Memory() override { uccl_nixl_unload_memory(memory); }
};

// Rust reads the pointer of each descriptor's metadata itself (src/ffi.rs).
static_assert(sizeof(Memory) == 24);

const uccl_nixl_memory *memory_of(const nixlBackendMD *metadata) {
    return metadata == nullptr ? nullptr : static_cast<const Memory *>(metadata)->memory;
}

// The metadata that NIXL has of memory. It may give one pointer back twice, which must harm nobody: memory is deleted only when
// as many others were given back after it as `kept` says. Until then no other memory has its address.
class Memories {
  public:
    Memory *add(uccl_nixl_memory *of) {
        auto memory = std::make_unique<Memory>(of);
        const std::lock_guard lock(mutex);
        live.insert(memory.get());
        return memory.release();
    }

    // The metadata of a region of this agent: each region has one.
    Memory *add_region(uccl_nixl_memory *of) {
        auto memory = std::make_unique<Memory>(of);
        const std::lock_guard lock(mutex);
        const auto [known, is_new] = regions.emplace(uccl_nixl_region_number(of), memory.get());
        if (!is_new) return known->second;
        live.insert(memory.get());
        return memory.release();
    }

    // Null if it was given back, or never made.
    Memory *find(nixlBackendMD *metadata) {
        const std::lock_guard lock(mutex);
        const auto found = live.find(static_cast<Memory *>(metadata));
        return found == live.end() ? nullptr : *found;
    }

    // Whether it was there.
    bool remove(nixlBackendMD *metadata) {
        const std::lock_guard lock(mutex);
        const auto found = live.find(static_cast<Memory *>(metadata));
        if (found == live.end()) return false;
        const auto region = regions.find(uccl_nixl_region_number((*found)->memory));
        if (region != regions.end() && region->second == *found) regions.erase(region);
        removed.emplace_back(*found);
        live.erase(found);
        if (removed.size() > kept) removed.pop_front();
        return true;
    }

    ~Memories() {
        for (Memory *memory : live) delete memory;
    }

  private:
    static constexpr std::size_t kept = 256;
    std::mutex mutex;
    std::unordered_set<Memory *> live;
    std::unordered_map<std::uint64_t, Memory *> regions;
    std::deque<std::unique_ptr<Memory>> removed;
};

// A transfer that was prepared.
class Transfer final : public nixlBackendReqH {
  public:
    uccl_nixl_transfer *const transfer;

    explicit Transfer(uccl_nixl_transfer *what) : transfer(what) {}
    ~Transfer() override { uccl_nixl_release(transfer); }
};

class Engine final : public nixlBackendEngine {
  public:
    explicit Engine(const nixlBackendInitParams *params)
        : nixlBackendEngine(params), instead_of_ucx(params->type == ucx_name) {
        std::vector<uccl_nixl_param> list;
        for (const auto &[name, value] : *params->customParams) {
            list.push_back({bytes(name), bytes(value)});
        }
        initErr = uccl_nixl_create(bytes(localAgent), instead_of_ucx, list.data(), list.size(), &agent) != success;
    }

    ~Engine() override { uccl_nixl_destroy(agent); }

    bool supportsRemote() const override { return true; }
    bool supportsLocal() const override { return true; }
    bool supportsNotif() const override { return true; }
    nixl_mem_list_t getSupportedMems() const override { return {DRAM_SEG, VRAM_SEG}; }

    nixl_status_t registerMem(const nixlBlobDesc &mem, const nixl_mem_t &kind, nixlBackendMD *&out) override {
        if (kind != DRAM_SEG && kind != VRAM_SEG) return not_supported;
        uccl_nixl_memory *memory = nullptr;
        const int status = uccl_nixl_register(agent, mem.addr, mem.len, kind == VRAM_SEG, &memory);
        if (status == success) out = memories.add_region(memory);
        return status;
    }

    nixl_status_t deregisterMem(nixlBackendMD *metadata) override {
        Memory *const known = memories.find(metadata);
        if (known == nullptr) return invalid_param;
        bool was_last = false;
        const int status = uccl_nixl_deregister(agent, known->memory, &was_last);
        // Memory that is not given back keeps its name: the same call waits again.
        if (status == success && was_last) memories.remove(metadata);
        return status;
    }

    nixl_status_t connect(const std::string &remote) override { return uccl_nixl_connect(agent, bytes(remote)); }
    nixl_status_t disconnect(const std::string &remote) override { return uccl_nixl_disconnect(agent, bytes(remote)); }

    nixl_status_t unloadMD(nixlBackendMD *metadata) override {
        if (metadata == nullptr) return success;
        return memories.remove(metadata) ? success : invalid_param;
    }

    nixl_status_t prepXfer(const nixl_xfer_op_t &op, const nixl_meta_dlist_t &local, const nixl_meta_dlist_t &remote,
                           const std::string &remote_agent, nixlBackendReqH *&handle,
                           const nixlBackendOptionalArgs *) const override {
        uccl_nixl_transfer *transfer = nullptr;
        const int status =
            uccl_nixl_prepare(agent, op == NIXL_WRITE, {local.descs.data(), local.descs.size()},
                              {remote.descs.data(), remote.descs.size()}, bytes(remote_agent), &transfer);
        if (status == success) handle = new Transfer(transfer);
        return status;
    }

    // The lists are those that the transfer was prepared from.
    nixl_status_t postXfer(const nixl_xfer_op_t &, const nixl_meta_dlist_t &, const nixl_meta_dlist_t &,
                           const std::string &, nixlBackendReqH *&handle,
                           const nixlBackendOptionalArgs *args) const override {
        if (handle == nullptr) return invalid_param;
        const bool notify = args != nullptr && args->hasNotif;
        const uccl_nixl_bytes notif = notify ? bytes(args->notifMsg) : uccl_nixl_bytes{};
        return uccl_nixl_post(agent, static_cast<Transfer *>(handle)->transfer, notify ? &notif : nullptr);
    }

    nixl_status_t checkXfer(nixlBackendReqH *handle) const override {
        if (handle == nullptr) return invalid_param;
        return uccl_nixl_check(static_cast<Transfer *>(handle)->transfer);
    }

    nixl_status_t releaseReqH(nixlBackendReqH *handle) const override {
        if (handle == nullptr) return success;
        const nixl_status_t status = uccl_nixl_cancel(static_cast<Transfer *>(handle)->transfer);
        // NIXL keeps a handle that was not released, and calls again.
        if (status == success) delete handle;
        return status;
    }

    nixl_status_t prepRemoteMemView(const void *, void *&, const nixlBackendOptionalArgs *) const override {
        uccl_nixl_refuse_view();
        return not_supported;
    }
    nixl_status_t prepLocalMemView(const void *, void *&, const nixlBackendOptionalArgs *) const override {
        uccl_nixl_refuse_view();
        return not_supported;
    }
    void releaseMemView(void *) const override {}

    nixl_status_t getPublicData(const nixlBackendMD *metadata, std::string &out) const override {
        if (metadata == nullptr) return invalid_param;
        return uccl_nixl_public_data(memory_of(metadata), &out, assign);
    }

    nixl_status_t getConnInfo(std::string &out) const override {
        return uccl_nixl_conn_info(agent, instead_of_ucx, &out, assign);
    }

    nixl_status_t loadRemoteConnInfo(const std::string &remote, const std::string &info) override {
        return uccl_nixl_load_conn_info(agent, bytes(remote), bytes(info));
    }

    nixl_status_t loadRemoteMD(const nixlBlobDesc &mem, const nixl_mem_t &, const std::string &,
                               nixlBackendMD *&out) override {
        uccl_nixl_memory *memory = nullptr;
        const int status = uccl_nixl_load_memory(mem.addr, mem.len, bytes(mem.metaInfo), &memory);
        if (status == success) out = memories.add(memory);
        return status;
    }

    nixl_status_t loadLocalMD(nixlBackendMD *metadata, nixlBackendMD *&out) override {
        if (metadata == nullptr) return invalid_param;
        out = memories.add(uccl_nixl_share_memory(memory_of(metadata)));
        return success;
    }

    nixl_status_t getNotifs(notif_list_t &out) override {
        if (!out.empty()) return invalid_param;
        return uccl_nixl_take_notifs(agent, &out, append);
    }

    nixl_status_t genNotif(const std::string &remote, const std::string &message) const override {
        return uccl_nixl_notify(agent, bytes(remote), bytes(message));
    }

    nixl_status_t queryMem(const nixl_reg_dlist_t &list, std::vector<nixl_query_resp_t> &out) const override {
        for (const auto &desc : list.descs) {
            nixl_b_params_t known;
            const int status = uccl_nixl_query(agent, desc.addr, desc.len, &known, insert);
            out.push_back(status == success ? nixl_query_resp_t(std::move(known)) : std::nullopt);
        }
        return success;
    }

    nixl_status_t estimateXferCost(const nixl_xfer_op_t &, const nixl_meta_dlist_t &, const nixl_meta_dlist_t &,
                                   const std::string &, nixlBackendReqH *const &handle,
                                   std::chrono::microseconds &duration, std::chrono::microseconds &error,
                                   nixl_cost_t &method, const void *) const override {
        if (handle == nullptr) return invalid_param;
        const auto cost = uccl_nixl_cost(static_cast<const Transfer *>(handle)->transfer);
        duration = std::chrono::microseconds(cost.duration_us);
        error = std::chrono::microseconds(cost.error_us);
        method = nixl_cost_t::ANALYTICAL_BACKEND;
        return success;
    }

    nixl_status_t reserved0() const override { return not_supported; }
    nixl_status_t reserved1() const override { return not_supported; }
    nixl_status_t reserved2() const override { return not_supported; }
    nixl_status_t reserved3() const override { return not_supported; }

  private:
    const bool instead_of_ucx;
    uccl_nixl_agent *agent = nullptr;
    Memories memories;
};

// Whether the parameters are laid out as declared: NIXL creates a backend under a name of the plugin's, which is short
// enough to lie in the string itself. Looked at word by word, as it may be something else.
bool is_laid_out_as_declared(const nixlBackendInitParams *params) {
    const auto *words = reinterpret_cast<const std::uintptr_t *>(&params->type);
    const bool in_place = words[0] == reinterpret_cast<std::uintptr_t>(words + 2);
    const bool has_its_length = words[1] == sizeof(plugin_name) - 1 || words[1] == sizeof(ucx_name) - 1;
    return in_place && has_its_length && (params->type == plugin_name || params->type == ucx_name) &&
           params->customParams != nullptr;
}

nixlBackendEngine *create(const nixlBackendInitParams *params) {
    if (params == nullptr || !is_laid_out_as_declared(params)) return nullptr;
    try {
        return new Engine(params);
    } catch (...) {
        return nullptr;
    }
}

void destroy(nixlBackendEngine *engine) { delete engine; }

nixl_b_params_t options() {
    nixl_b_params_t all;
    uccl_nixl_options(&all, insert);
    return all;
}

} // namespace

// Called by nixl_plugin_init, which is Rust's, because a cdylib exports only the functions of Rust
// code.
extern "C" nixlBackendPlugin *uccl_nixl_plugin(const char *version) {
    static const char *const plugin_version = version;
    static nixlBackendPlugin plugin = {
        1,
        create,
        destroy,
        [] { return plugin_name; },
        [] { return plugin_version; },
        options,
        [] { return nixl_mem_list_t{DRAM_SEG, VRAM_SEG}; },
    };
    return &plugin;
}
