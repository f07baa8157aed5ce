// The part of NIXL's backend interface that a plugin and NIXL share in memory: objects, their
// layouts, and the order of virtual functions. Declared here, after NIXL 1.0 to 1.5, so that
// building the plugin needs no NIXL. Names that NIXL's own libraries resolve by symbol do not
// occur; only sizes, offsets and order count. The assertions at the end hold them, and host.rs
// compares the order with the NIXL that loads the plugin.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

enum nixl_mem_t { DRAM_SEG, VRAM_SEG, BLK_SEG, OBJ_SEG, FILE_SEG };
enum nixl_xfer_op_t { NIXL_READ, NIXL_WRITE };
enum class nixl_cost_t { ANALYTICAL_BACKEND = 0 };

// NIXL's status is an enum of negative errors; an int of the same size takes every value that versions may add.
using nixl_status_t = int;

using nixl_b_params_t = std::unordered_map<std::string, std::string>;
using nixl_mem_list_t = std::vector<nixl_mem_t>;
using nixl_query_resp_t = std::optional<nixl_b_params_t>;
using notif_list_t = std::vector<std::pair<std::string, std::string>>;

struct nixlBackendInitParams {
    std::string localAgent;
    std::string type;
    nixl_b_params_t *customParams;
    bool enableProgTh;
    std::uint64_t pthrDelay;
    int syncMode;
    bool enableTelemetry;
};

class nixlBackendReqH {
  public:
    virtual ~nixlBackendReqH() = default;
};

class nixlBackendMD {
  protected:
    bool isPrivateMD;

  public:
    explicit nixlBackendMD(bool is_private) : isPrivateMD(is_private) {}
    virtual ~nixlBackendMD() = default;
};

struct nixlBasicDesc {
    std::uintptr_t addr;
    std::size_t len;
    std::uint64_t devId;
};

struct nixlBlobDesc : nixlBasicDesc {
    std::string metaInfo;
};

struct nixlMetaDesc : nixlBasicDesc {
    nixlBackendMD *metadataP;
};

// A list of descriptors. NIXL keeps its methods to itself.
template <class Desc>
struct nixlDescList {
    const void *vtable;
    nixl_mem_t type;
    std::vector<Desc> descs;
};

using nixl_meta_dlist_t = nixlDescList<nixlMetaDesc>;
using nixl_reg_dlist_t = nixlDescList<nixlBlobDesc>;

struct nixlBackendOptionalArgs {
    std::string notifMsg;
    bool hasNotif;
    std::string customParam;
};

// Events of telemetry. Their layout differs between versions: the plugin adds none and leaves the
// list empty. NIXL's measurements of each transfer do not pass through here.
struct nixlTelemetryEvents {
    void *begin = nullptr, *end = nullptr, *limit = nullptr;
};

class nixlBackendEngine {
  private:
    std::string backendType;
    nixl_b_params_t customParams;
    nixlTelemetryEvents telemetryEvents;
    std::mutex telemetryEventsMutex;

  protected:
    bool initErr = false;
    const std::string localAgent;
    const bool enableTelemetry;

  public:
    explicit nixlBackendEngine(const nixlBackendInitParams *params)
        : backendType(params->type), customParams(*params->customParams), localAgent(params->localAgent),
          enableTelemetry(params->enableTelemetry) {}

    virtual ~nixlBackendEngine() = default;

    virtual bool supportsRemote() const = 0;
    virtual bool supportsLocal() const = 0;
    virtual bool supportsNotif() const = 0;
    virtual nixl_mem_list_t getSupportedMems() const = 0;
    virtual nixl_status_t registerMem(const nixlBlobDesc &, const nixl_mem_t &, nixlBackendMD *&) = 0;
    virtual nixl_status_t deregisterMem(nixlBackendMD *) = 0;
    virtual nixl_status_t connect(const std::string &) = 0;
    virtual nixl_status_t disconnect(const std::string &) = 0;
    virtual nixl_status_t unloadMD(nixlBackendMD *) = 0;
    virtual nixl_status_t prepXfer(const nixl_xfer_op_t &, const nixl_meta_dlist_t &, const nixl_meta_dlist_t &,
                                   const std::string &, nixlBackendReqH *&, const nixlBackendOptionalArgs *) const = 0;
    virtual nixl_status_t postXfer(const nixl_xfer_op_t &, const nixl_meta_dlist_t &, const nixl_meta_dlist_t &,
                                   const std::string &, nixlBackendReqH *&, const nixlBackendOptionalArgs *) const = 0;
    virtual nixl_status_t checkXfer(nixlBackendReqH *) const = 0;
    virtual nixl_status_t releaseReqH(nixlBackendReqH *) const = 0;
    virtual nixl_status_t prepRemoteMemView(const void *, void *&, const nixlBackendOptionalArgs *) const = 0;
    virtual nixl_status_t prepLocalMemView(const void *, void *&, const nixlBackendOptionalArgs *) const = 0;
    virtual void releaseMemView(void *) const = 0;
    virtual nixl_status_t getPublicData(const nixlBackendMD *, std::string &) const = 0;
    virtual nixl_status_t getConnInfo(std::string &) const = 0;
    virtual nixl_status_t loadRemoteConnInfo(const std::string &, const std::string &) = 0;
    virtual nixl_status_t loadRemoteMD(const nixlBlobDesc &, const nixl_mem_t &, const std::string &,
                                       nixlBackendMD *&) = 0;
    virtual nixl_status_t loadLocalMD(nixlBackendMD *, nixlBackendMD *&) = 0;
    virtual nixl_status_t getNotifs(notif_list_t &) = 0;
    virtual nixl_status_t genNotif(const std::string &, const std::string &) const = 0;
    virtual nixl_status_t queryMem(const nixl_reg_dlist_t &, std::vector<nixl_query_resp_t> &) const = 0;
    virtual nixl_status_t estimateXferCost(const nixl_xfer_op_t &, const nixl_meta_dlist_t &, const nixl_meta_dlist_t &,
                                           const std::string &, nixlBackendReqH *const &, std::chrono::microseconds &,
                                           std::chrono::microseconds &, nixl_cost_t &, const void *) const = 0;

    // Where a later NIXL may have put functions of its own. By NIXL's habit they return a status.
    virtual nixl_status_t reserved0() const = 0;
    virtual nixl_status_t reserved1() const = 0;
    virtual nixl_status_t reserved2() const = 0;
    virtual nixl_status_t reserved3() const = 0;
};

struct nixlBackendPlugin {
    int api_version;
    nixlBackendEngine *(*create_engine)(const nixlBackendInitParams *);
    void (*destroy_engine)(nixlBackendEngine *);
    const char *(*get_plugin_name)();
    const char *(*get_plugin_version)();
    nixl_b_params_t (*get_backend_options)();
    nixl_mem_list_t (*get_backend_mems)();
};

static_assert(sizeof(std::string) == 32 && sizeof(nixl_b_params_t) == 56, "libstdc++ with its C++11 strings");
static_assert(sizeof(nixlBackendInitParams) == 96);
// The mutex is glibc's: 40 bytes on x86-64, 48 on aarch64.
static_assert(sizeof(nixlBackendEngine) == 168 + sizeof(std::mutex));
static_assert(sizeof(nixlBackendMD) == 16);
static_assert(sizeof(nixlBackendReqH) == 8);
static_assert(sizeof(nixlBasicDesc) == 24 && sizeof(nixlBlobDesc) == 56 && sizeof(nixlMetaDesc) == 32);
static_assert(sizeof(nixl_meta_dlist_t) == 40);
static_assert(sizeof(nixlBackendOptionalArgs) == 72);
static_assert(sizeof(nixlBackendPlugin) == 56);
